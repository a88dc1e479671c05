"""What all tests share: tiny models on one thread."""

from __future__ import annotations

import signal

import torch

torch.set_num_threads(1)

# Under nohup, and in the background of a script, Ctrl-C is ignored, and by every child; the tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

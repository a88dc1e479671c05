"""What all tests share: tiny models on one thread, and imports that the garbage collector does not walk
again and again."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest

# Read when torch is imported. Workers of pytest share the cores: threads that wait for others by spinning would take
# them from those that compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports millions of objects, all of which stay: none is garbage in any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Under nohup, and in the background of a script, Ctrl-C is ignored, and by every child; the tests send it to
# theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""What all tests share: tiny models on one thread."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

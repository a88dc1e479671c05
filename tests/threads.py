"""The compiled loops by a chosen number of threads, however small the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tlt.models.loops import attention, layers, products


@contextmanager
def computing_by(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for module in (attention, layers, products):
                patch.setattr(module, "PRODUCTS_PER_THREAD", 1)
            yield
    finally:
        torch.set_num_threads(before)

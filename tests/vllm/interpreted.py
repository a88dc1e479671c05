"""The law's kernels in a process of their own, because Triton decides when it is imported whether it
interprets or compiles."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt.base.types import SamplingParams
from tlt.speculation.law.params import BatchParams


@dataclass(frozen=True)
class Rows:
    """Rows to draw at. logits: [R, V], perhaps a part of a wider tensor.  params: of one row each."""

    logits: Tensor
    keys: Tensor
    positions: Tensor
    params: tuple[SamplingParams, ...]


@contextmanager
def triton_process(interprets: bool) -> Iterator[Callable[..., Any]]:
    """Yields what calls a function in a process whose Triton interprets, or compiles."""
    with ProcessPoolExecutor(1, get_context("spawn"), _start, (interprets,)) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=600)


def _start(interprets: bool) -> None:
    assert "triton" not in sys.modules, "too late"
    os.environ["TRITON_INTERPRET"] = str(int(interprets))
    torch.set_num_threads(1)


def draw_rows(rows: Rows, width: int) -> tuple[Tensor, Tensor]:
    """Returns what the kernel draws. width: of the tensor that the logits are a part of."""
    from tlt.speculation.law import fused

    wide = torch.full((len(rows.logits), width), torch.finfo(rows.logits.dtype).max, dtype=rows.logits.dtype)
    logits_RV = wide[:, : rows.logits.shape[1]]
    logits_RV.copy_(rows.logits)
    with np.errstate(all="ignore"):  # a row that is no distribution has no log-probability: inf - inf
        tokens_R, logprobs_R = fused.draw(logits_RV, rows.keys, rows.positions, BatchParams(rows.params))
    return tokens_R.clone(), logprobs_R.clone()


def make_noise(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    from tlt.speculation.law import fused

    return fused.gumbel_noise(keys, positions, vocab_size)


class _Hopper:
    """Stands in for Triton's driver of an H100 that is not here."""

    @staticmethod
    def get_current_target() -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    @staticmethod
    def get_current_device() -> int:
        return 0

    @staticmethod
    def get_current_stream(device: int = 0) -> int:
        return 0

    @staticmethod
    def get_active_torch_device() -> torch.device:
        return torch.device("cpu")


def compile_as_called(cases: Sequence[tuple[torch.dtype, int, Sequence[SamplingParams]]]) -> list[str]:
    """Compiles the kernels for an H100 with the very arguments that `draw` and `gumbel_noise` give them,
    and launches none. Returns what came out. cases: type of the logits, vocabulary, parameters of the
    rows."""
    from unittest.mock import patch

    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tlt.speculation.law import fused

    driver.set_active(_Hopper())
    run, found = JITFunction.run, []

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made = run(kernel, *args, grid=grid, warmup=True, **options)
        found.append(
            f"{made.metadata.name} of {made.metadata.num_warps} warps for {made.metadata.target.arch}"
        )

    with patch.object(JITFunction, "run", compiled), patch.object(torch, "empty", torch.zeros):
        for dtype, vocab_size, params in cases:
            num_rows = len(params)
            keys = torch.zeros(num_rows, 4, dtype=torch.int64)
            logits, positions = (
                torch.zeros(num_rows, vocab_size, dtype=dtype),
                torch.zeros(num_rows, dtype=torch.int64),
            )
            fused.draw(logits, keys, positions, BatchParams(params))
            fused.gumbel_noise(keys, positions[:, None], vocab_size)
    return found

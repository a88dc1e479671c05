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
from tlt.speculation.law.params import BatchParams, Law


@dataclass(frozen=True)
class Rows:
    """Rows to draw at. logits: [R, V], perhaps a part of a wider tensor.  params: of one row each."""

    logits: Tensor
    keys: Tensor
    positions: Tensor
    params: tuple[SamplingParams, ...]

    @property
    def law(self) -> Law:
        return Law(self.keys, self.positions, BatchParams.of(self.params))


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
        tokens_R, logprobs_R = fused.draw(logits_RV, rows.law)
    return tokens_R.clone(), logprobs_R.clone()


def make_noise(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    from tlt.speculation.law import fused

    return fused.gumbel_noise(keys, positions, vocab_size)


def _driver_of(arch: int) -> type:
    """Returns what stands in for Triton's driver of a GPU that is not here."""

    class Driver:
        @staticmethod
        def get_current_target() -> Any:
            from triton.backends.compiler import GPUTarget

            return GPUTarget("cuda", arch, 32)

        @staticmethod
        def get_current_device() -> int:
            return 0

        @staticmethod
        def get_current_stream(device: int = 0) -> int:
            return 0

        @staticmethod
        def get_active_torch_device() -> torch.device:
            return torch.device("cpu")

    return Driver


@contextmanager
def compiling(arch: int) -> Iterator[list[Any]]:
    """Kernels that are called meanwhile are compiled for such a GPU with the very arguments of the call, and not
    launched. Yields the list that they go into."""
    from unittest.mock import patch

    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_driver_of(arch))
    run = JITFunction.run
    found: list[Any] = []

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(run(kernel, *args, grid=grid, warmup=True, **options))

    with patch.object(JITFunction, "run", compiled), patch.object(torch, "empty", torch.zeros):
        yield found


def compile_as_called(cases: Sequence[tuple[torch.dtype, int, Sequence[SamplingParams]]]) -> list[str]:
    """Compiles the kernels as `draw` and `gumbel_noise` call them. Returns what came out. cases: type of the
    logits, vocabulary, parameters of the rows."""
    from tlt.speculation.law import fused

    with compiling(90) as found:
        for dtype, vocab_size, params in cases:
            num_rows = len(params)
            keys = torch.zeros(num_rows, 4, dtype=torch.int64)
            logits, positions = (
                torch.zeros(num_rows, vocab_size, dtype=dtype),
                torch.zeros(num_rows, dtype=torch.int64),
            )
            fused.draw(logits, Law(keys, positions, BatchParams.of(params)))
            fused.gumbel_noise(keys, positions[:, None], vocab_size)
    return [
        f"{made.metadata.name} of {made.metadata.num_warps} warps for {made.metadata.target.arch}"
        for made in found
    ]

"""The law's kernels in a process of their own, because Triton decides when it is imported whether it
interprets or compiles."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt.base.types import SamplingParams
from tlt.speculation.law.params import BatchParams

SOURCE = Path(__file__).parents[2] / "tlt" / "speculative" / "fused.py"


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


def draw_rows(source: Path, rows: Rows, width: int) -> tuple[Tensor, Tensor]:
    """Returns what the kernel of this source draws. width: of the tensor that the logits are a part of."""
    wide = torch.full((len(rows.logits), width), torch.finfo(rows.logits.dtype).max, dtype=rows.logits.dtype)
    wide[:, : rows.logits.shape[1]] = rows.logits
    with np.errstate(
        all="ignore"
    ):  # inf - inf is meant: a row that is no distribution has no log-probability
        drawn = load(source).draw(
            wide[:, : rows.logits.shape[1]], rows.keys, rows.positions, BatchParams(rows.params)
        )
    return drawn[0].clone(), drawn[1].clone()


def make_noise(source: Path, keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    noise: Tensor = load(source).gumbel_noise(keys, positions, vocab_size)
    return noise


def load(source: Path) -> ModuleType:
    """Returns the kernels of a file: fused.py, or a copy with a fault."""
    name = f"kernels_of_{source.parent.name}_{source.stem}".replace("-", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def planted(folder: Path, changes: Sequence[tuple[str, str]], appended: str = "") -> Path:
    """Returns a copy of the kernels in which every old text, which must occur once, is a new one."""
    text = SOURCE.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    path = folder / "fused.py"
    path.write_text(text + appended, encoding="utf-8")
    return path


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

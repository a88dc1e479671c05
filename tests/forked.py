"""Ranks of a test as processes, forked from one that has imported what they need: imports are most of what
a rank costs."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
RankMain = Callable[[int, int, Path], None]
"""rank, number of ranks, folder: what a rank runs."""


def run_ranks(file: str, folder: Path, *sizes: int, patience: float = 280.0) -> None:
    """Runs a test's file as a program, whose `fork_ranks` runs as many groups of ranks as there are sizes,
    at the same time. Each group has the folder named after its size."""
    for size in sizes:
        (folder / str(size)).mkdir()
    words = [sys.executable, file, str(folder), *map(str, sizes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RES_OPTIONS": "timeout:1 attempts:1"}
    with subprocess.Popen(words, env=environment, start_new_session=True) as process:
        try:
            assert process.wait(timeout=patience) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own


def fork_ranks(rank_main: RankMain) -> None:
    """The program's side: forks all ranks, and ends with 1 where any of them fails. A rank that returns
    has not."""
    importlib.import_module("torch._dynamo")  # else an optimizer's first step imports it, in every rank
    gc.freeze()  # what is imported is no garbage of any rank
    folder, sizes = Path(sys.argv[1]), map(int, sys.argv[2:])
    ranks = [_fork(rank_main, rank, size, folder / str(size)) for size in sizes for rank in range(size)]
    endings = [os.waitpid(rank, 0)[1] for rank in ranks]
    sys.exit(any(endings))


def _fork(rank_main: RankMain, rank: int, size: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    try:
        rank_main(rank, size, folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

"""Processes as tests of reward workers see them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt.base.types import Reward
from tlt.tasks.rewards.pool import RewardPool
from tlt.tasks.rewards.scoring import RewardSpec


def score_texts(
    spec: RewardSpec,
    texts: Sequence[str],
    num_workers: int = 1,
    timeout: float = 60,
    problem: Mapping[str, Any] | None = None,
) -> list[Reward]:
    """Returns the rewards of the responses; response i is worth i, unless a problem is given for all."""
    with RewardPool(spec, num_workers, timeout) as pool:
        for i, text in enumerate(texts):
            pool.submit(("p", i), {"worth": float(i)} if problem is None else problem, text)
        rewards = pool.drain(patience=100)
        assert pool.drain() == {}
    return [rewards["p", i] for i in range(len(texts))]


def is_running(pid: int) -> bool:
    """Whether the process is alive and no zombie (init reaps an orphan in its own time)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid():
            found.add(int(stat.parent.name))
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    """Waits for other processes, a minute at most."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_files(folder: Path, pattern: str, num: int) -> list[Path]:
    wait_until(lambda: len(list(folder.glob(pattern))) == num)
    return list(folder.glob(pattern))

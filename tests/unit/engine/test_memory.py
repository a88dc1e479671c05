"""The memory that a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt.engine.memory import machine_bytes

GIB = 2**30


def test_the_least_limit_of_all_control_groups_counts(tmp_path: Path) -> None:
    own, none = tmp_path / "own", machine_bytes(tmp_path / "none", tmp_path / "none")
    root = tmp_path / "cgroup"

    def limit(file: str, text: str) -> None:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    own.write_text("0::/system.slice/job.scope\n")
    assert machine_bytes(root, own) == none
    limit("system.slice/job.scope/memory.max", "max")
    assert machine_bytes(root, own) == none
    limit("system.slice/memory.max", str(GIB))
    limit("memory.max", str(2 * GIB))
    limit("other.slice/memory.max", "1")
    assert machine_bytes(root, own) == GIB


@pytest.mark.parametrize("file", ["slurm/job_7/memory.limit_in_bytes", "memory.limit_in_bytes"])
def test_so_does_that_of_the_first_version(file: str, tmp_path: Path) -> None:
    own, path = tmp_path / "own", tmp_path / "memory" / file
    own.write_text("8:pids:/\n4:cpu,memory:/slurm/job_7\n")
    path.parent.mkdir(parents=True)
    path.write_text(str(GIB))
    assert machine_bytes(tmp_path, own) == GIB

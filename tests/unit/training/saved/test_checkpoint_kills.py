"""A checkpoint's writer that is killed, or meets a full disk, at any of its moments: what was before is
whole, and it goes on.

A moment is one call that changes the disk: a chunk of bytes, a flush, a rename, a removal. Each kill is a
process of its own, forked from one that has imported torch, which counts the moments and ends itself amid
the chosen one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.saved.saved_parts import (
    ALONE,
    assert_holds,
    make_checkpoint,
    names_in,
    refusal,
    save,
    save_checkpoint,
)
from tlt.training.saved import shards
from tlt.training.saved.checkpoint import CheckpointWriter, find_checkpoint

MOMENTS = ((shards, "write_chunk"), (os, "fsync"), (Path, "rename"), (shutil, "rmtree"), (os, "rmdir"))
"""Every call of these changes the disk."""


class Moments:
    """Counts the moments of what runs within it, and does something at one of them."""

    def __init__(self, chosen: int, action: Any) -> None:
        self.chosen, self.action, self.num = chosen, action, 0

    def __enter__(self) -> Moments:
        self.before = [(place, name, getattr(place, name)) for place, name in MOMENTS]
        for place, name, call in self.before:
            setattr(place, name, self._counted(call))
        return self

    def __exit__(self, *_: object) -> None:
        for place, name, call in self.before:
            setattr(place, name, call)

    def _counted(self, call: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.num += 1
            if self.num - 1 == self.chosen:
                if call is self.before[0][2]:  # half of the bytes are written
                    file, chunk = arguments
                    call(file, chunk[: len(chunk) // 2])
                    file.flush()
                self.action()
            return call(*arguments, **named)

        return counted


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_every_moment(folder: Path) -> None:
    """Saves step 3 into copies of a folder that holds steps 1 and 2, each time killed at another moment."""
    for moment in range(1000):
        copy = folder.with_name(f"killed-{moment:03d}")
        shutil.copytree(folder, copy)
        if (pid := os.fork()) == 0:
            with Moments(moment, die):
                save_checkpoint(copy, make_checkpoint(3, 3.0))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status == 0:  # there was no such moment
            shutil.rmtree(copy)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("kills") / "checkpoints"
    for step in (1, 2):
        save(folder, step, step)
    module = "tests.unit.training.saved.test_checkpoint_kills"
    program = f"import sys, pathlib, {module}; {module}.kill_at_every_moment(pathlib.Path(sys.argv[1]))"
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return sorted(folder.parent.glob("killed-*"))


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint_from_which_the_run_goes_on(
    killed: list[Path],
) -> None:
    assert len(killed) > 12
    went_on_from = []
    for folder in killed:
        found = find_checkpoint(folder, ALONE)
        assert found is not None
        step = found[1].step
        assert_holds(folder, step, step)
        went_on_from.append(step)
        for again in range(step + 1, 5):
            save(folder, again, again)
        assert_holds(folder, 4, 4)
        assert names_in(folder) == ["step-00000003", "step-00000004"], "nothing is left of the killed writer"
    assert went_on_from == sorted(went_on_from), "new from one moment on"
    assert {2, 3} == {*went_on_from}


def test_a_disk_that_fills_at_any_moment_is_one_line_and_leaves_what_was(tmp_path: Path) -> None:
    save(tmp_path / "first", 1, 1)

    def full() -> None:
        raise OSError(28, "No space left on device")

    refused = 0
    for moment in range(1000):
        folder = tmp_path / str(moment)
        shutil.copytree(tmp_path / "first", folder)
        writer = CheckpointWriter(folder, ALONE)
        with Moments(moment, full) as moments:
            writer.save(make_checkpoint(2, 2.0))
            if writer._thread is not None:
                writer._thread.join()
        if moments.num <= moment:
            break
        if writer._error is not None:  # what is removed afterwards may fail after the commit
            assert "No space left" in refusal(writer.wait)
            refused += 1
        save(folder, 3, 3)
        assert_holds(folder, 3, 3)
        assert all(name.startswith("step-") for name in names_in(folder))
    assert refused > 8

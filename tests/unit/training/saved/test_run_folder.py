"""Two processes never write into one run's folder, and no new run into one that holds a run."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tlt.base.types import UserError
from tlt.training.saved.run_folder import FolderLock, explain_os_error, refuse_begun


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        FolderLock(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_folder_is_held_by_one_process_until_it_dies(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from tlt.training.saved.run_folder import FolderLock;"
    program += "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert f"another process is running in {tmp_path}" in refusal(tmp_path)
    holder.kill()
    holder.communicate()
    FolderLock(tmp_path).release()


def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/run")):
        assert refusal(folder).startswith(f"run.out_dir: {folder} cannot be written (")


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL])
def test_a_file_system_without_locks_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert refusal(tmp_path) == (
        f"run.out_dir: {tmp_path} lies on a file system without locks or without appending "
        f"({os.strerror(number)}), as mounted buckets are; give one on a disk, a volume or NFS"
    )


@pytest.mark.parametrize("overwrites", [True, False])
def test_a_file_system_that_does_not_append_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrites: bool
) -> None:
    """A bucket's client writes a file anew, or refuses to write to one that exists."""
    really = Path.open

    def opened(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "a" and path.exists() and path.stat().st_size:
            if not overwrites:
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            mode = "w"
        return really(path, mode, **options)

    monkeypatch.setattr(Path, "open", opened)
    assert "without locks or without appending" in refusal(tmp_path)
    monkeypatch.undo()
    FolderLock(tmp_path).release()  # the refused start has let go
    before = (tmp_path / ".lock").read_bytes()
    FolderLock(tmp_path).release()
    assert (tmp_path / ".lock").read_bytes() == before, "a start leaves nothing there"


@pytest.mark.parametrize("left", ["metrics.jsonl", "evaluations.jsonl", "checkpoints/step-00000010"])
def test_a_folder_is_a_runs_as_soon_as_something_in_it_is_worth_keeping(left: str, tmp_path: Path) -> None:
    """An attempt whose task was at fault has written its configuration and an empty metrics.jsonl."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text('{"run": {}, "model": {}, "task": {}}')
    (tmp_path / "metrics.jsonl").touch()
    refuse_begun(tmp_path)
    (tmp_path / left).write_text("{}\n")
    with pytest.raises(
        UserError, match=f"holds a run already; continue it with tlt train --resume {tmp_path}"
    ):
        refuse_begun(tmp_path)


@pytest.mark.parametrize("comes_again", [False, True])
def test_a_folder_that_was_removed_is_missed_even_where_another_has_its_name(
    comes_again: bool, tmp_path: Path
) -> None:
    lock = FolderLock(tmp_path / "run")
    lock.check()
    shutil.rmtree(tmp_path / "run")
    if comes_again:
        (tmp_path / "run").mkdir()
    with pytest.raises(
        UserError, match=r"^run\.out_dir: .*/run has been removed, or moved, under the run; bring it"
    ):
        lock.check()
    lock.release()


@pytest.mark.parametrize("name", ["my runs/the first", "a;b", "it's", "plain"])
def test_a_command_to_type_takes_any_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    explained = explain_os_error(OSError(28, "No space left on device", str(folder / "x")), folder)
    words = shlex.split(str(explained).partition("; ")[2])
    assert words[words.index("--resume") + 1] == str(folder)

"""A run's folder: whether a run has begun in it, and that one process at a time writes there. Knows files alone."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import IO

from tlt.types import UserError


def has_begun(folder: Path) -> bool:
    """Returns whether a run has begun in the folder: it has left a step, an evaluation or a checkpoint. An attempt that ended
    before, such as one whose task was at fault, has nothing to keep."""
    files = (folder / name for name in ("metrics.jsonl", "evaluations.jsonl"))
    has_left = any(file.is_file() and file.stat().st_size for file in files) or any(folder.glob("checkpoints/step-*"))
    return has_left and (folder / "config.json").exists()


def can_go_on(folder: Path) -> bool:
    """Returns whether there is something to go on from in the folder: a run that has begun, or responses of one that had not
    come so far."""
    return has_begun(folder) or any(folder.glob("journal/step-*/*"))


def forget_journal(folder: Path) -> bool:
    """Removes the responses of an attempt that is not gone on with. Returns whether there were any."""
    had_any = any(folder.glob("journal/step-*/*"))
    shutil.rmtree(folder / "journal", ignore_errors=True)
    return had_any


def refuse_begun(folder: Path) -> None:
    """Raises UserError where a run has begun in the folder."""
    if has_begun(folder):
        raise UserError(
            f"run.out_dir: {folder} holds a run already;"
            f" continue it with tlt train --resume {folder}, or give another --run.out_dir"
        )


class FolderLock:
    """Holds a folder until `release`, or until the process ends, however it ends: the kernel keeps the lock. Makes the folder.
    Raises UserError where another process holds it, or nothing can be written there."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = (folder / ".lock").open("a")
        except OSError as error:
            raise UserError(f"run.out_dir: {folder} cannot be written ({error.strerror}); give another --run.out_dir") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f"run.out_dir: another process is running in {folder}; wait for its end, stop it, or give another --run.out_dir"
            ) from None

    def release(self) -> None:
        """Lets others have the folder."""
        self._file.close()

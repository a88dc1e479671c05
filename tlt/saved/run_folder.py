"""A run's folder: whether a run has begun in it, that one process at a time writes there, why it cannot.
Knows files alone."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

from tlt.io.files import way_out
from tlt.types import UserError

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP)


def has_begun(folder: Path) -> bool:
    """Returns whether a run has begun in the folder: it has left a step, an evaluation or a checkpoint. An
    attempt that ended before, such as one whose task was at fault, has nothing to keep."""
    files = (folder / name for name in ("metrics.jsonl", "evaluations.jsonl"))
    has_left = any(file.is_file() and file.stat().st_size for file in files) or any(
        folder.glob("checkpoints/step-*")
    )
    return has_left and (folder / "config.json").exists()


def can_go_on(folder: Path) -> bool:
    """Returns whether there is something to go on from in the folder: a run that has begun, or responses
    of one that had not come so far."""
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
    """Holds a folder until `release`, or until the process ends, however it ends: the kernel keeps the
    lock. Makes the folder. Raises UserError where another process holds it, or nothing can be written
    there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._opened = os.open(folder, os.O_RDONLY)  # while it is open, no other folder has its number
            self._file: IO[str] = (folder / ".lock").open("a")
        except OSError as error:
            raise UserError(
                f"run.out_dir: {folder} cannot be written ({error.strerror}); give another --run.out_dir"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise UserError(
                f"run.out_dir: another process is running in {folder}; wait for its end, stop it, or give "
                "another --run.out_dir"
            ) from None

    def check(self) -> None:
        """Raises UserError where the folder has been removed, or another lies in its place: nothing is to
        be written there."""
        try:
            is_there = os.path.samestat(os.fstat(self._opened), os.stat(self._folder))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise _removed(self._folder)

    def release(self) -> None:
        """Lets others have the folder."""
        if not self._file.closed:
            self._file.close()
            os.close(self._opened)


def explain_os_error(error: OSError, folder: Path) -> UserError | None:
    """Returns a run's error of the system as what is wrong with its folder, or with the disk; None: it is
    neither."""
    named = Path(error.filename) if isinstance(error.filename, str | Path) else None
    is_inside = named is not None and named.is_relative_to(folder)
    if error.errno == errno.ENOENT and not folder.exists():
        return _removed(folder)
    if error.errno in _DISK_ERRORS or (error.errno in _IN_THE_WAY and is_inside):
        reason = error.strerror or str(error)
        remedy = f"{way_out(reason)}, then tlt train --resume {folder}"
        return UserError(f"{named or folder}: cannot be written ({reason}); {remedy}")
    return None


def _removed(folder: Path) -> UserError:
    return UserError(
        f"run.out_dir: {folder} has been removed, or moved, under the run; bring it back, then tlt train "
        f"--resume {folder}, or"
        " begin a new run"
    )

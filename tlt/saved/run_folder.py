"""A run's folder: whether a run has begun in it, a lock for its one writer, and errors of writing there."""

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
    attempt that ended earlier, for example because its task was faulty, has nothing to keep."""
    files = (folder / name for name in ("metrics.jsonl", "evaluations.jsonl"))
    has_lines = any(file.is_file() and file.stat().st_size for file in files)
    has_left = has_lines or any(folder.glob("checkpoints/step-*"))
    return has_left and (folder / "config.json").exists()


def can_go_on(folder: Path) -> bool:
    """Returns whether a run can go on in the folder: one has begun there, or an attempt has left
    responses."""
    return has_begun(folder) or _has_journal(folder)


def _has_journal(folder: Path) -> bool:
    return any(folder.glob("journal/step-*/*"))


def forget_journal(folder: Path) -> bool:
    """Removes the responses of an earlier attempt. Returns whether there were any."""
    had_any = _has_journal(folder)
    shutil.rmtree(folder / "journal", ignore_errors=True)
    return had_any


def refuse_begun(folder: Path) -> None:
    """Raises UserError if a run has begun in the folder."""
    if has_begun(folder):
        raise UserError(
            f"run.out_dir: {folder} holds a run already;"
            f" continue it with tlt train --resume {folder}, or give another --run.out_dir"
        )


class FolderLock:
    """A lock of the kernel on a folder, held until `release` or the end of the process. Makes the folder.
    Raises UserError if another process holds the lock, or nothing can be written there."""

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
                f"run.out_dir: another process is running in {folder}; wait for its end, stop it, "
                "or give another --run.out_dir"
            ) from None

    def check(self) -> None:
        """Raises UserError if the folder has been removed or replaced."""
        try:
            is_there = os.path.samestat(os.fstat(self._opened), os.stat(self._folder))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise _removed(self._folder)

    def release(self) -> None:
        """Releases the lock."""
        if not self._file.closed:
            self._file.close()
            os.close(self._opened)


def explain_os_error(error: OSError, folder: Path) -> UserError | None:
    """Returns the UserError for an OSError that is due to the run's folder or the disk; None: it is not."""
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
        f"run.out_dir: {folder} has been removed, or moved, under the run; bring it back, "
        f"then tlt train --resume {folder}, or begin a new run"
    )

"""A run's folder: who may write here, its lock, and errors of writing.

claim     before a process starts: the folder is new, empty, a run's, or holds no name that a run writes
.lock     made by the first attempt; marks the folder as a run's
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final

from tlt.base.io.files import check_replaceable, matches, parse_json, read_file, remove_own, way_out
from tlt.base.io.text import quoted
from tlt.base.types import UserError
from tlt.models.hf.files import ADAPTER_FILES, CHECKPOINT_FILES, DRAFTER_FILES

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP)

PRODUCTS: Final = {
    "policy": CHECKPOINT_FILES,
    "best": CHECKPOINT_FILES,
    "adapter": ADAPTER_FILES,
    "drafter": DRAFTER_FILES,
}
"""Folders that a run replaces → patterns of files."""
_REPLACED = (*PRODUCTS, *(f".{name}.{state}" for name in PRODUCTS for state in ("new", "old")))
_KEPT_BY_AN_ATTEMPT = (
    ".lock",
    "config.json",
    "environment.jsonl",
    "console.log",
    "failures.log",
    "tracking.json*",
    "tracking.log",
    "timeline.rank*.jsonl",
    "metrics.jsonl",
    "evaluations.jsonl",
    "prompts.train.jsonl",
    "prompts.test.jsonl",
    "journal",
    "responses",
    "checkpoints",
)
WRITTEN: Final = (*_KEPT_BY_AN_ATTEMPT, "timeline.json", *_REPLACED)
_MARK = "A run of TLT writes in this folder.\n"
JOURNAL_FILES: Final = ("replica-" + "[0-9]" * 5 + ".*",)


# ── may a run write here? ───────────────────────────────────────────────────────────────────────────────────


def claim(folder: Path, inputs: Mapping[str, Path], goes_on: bool) -> None:
    """UserError where a run would replace or remove foreign files.

    inputs: the run's files and folders, by key.
    goes_on: the run has begun there.
    """
    try:
        if not goes_on:
            _refuse_foreign(folder)
        for name, own in PRODUCTS.items():
            check_replaceable(folder / name, own)
    except OSError as error:
        what = f"{error.filename} cannot be read ({error.strerror})"
        raise UserError(f"run.out_dir: {what}; give another --run.out_dir") from None
    for key, path in inputs.items():
        for place in [folder / name for name in WRITTEN] if goes_on else [folder]:
            if (how := _overlap(path, place)) is not None:
                what = f"{place} {how} {key}, {path}, which a run only reads"
                whose = "begin a new run in" if goes_on else "give"
                raise UserError(f"run.out_dir: {what}; {whose} another --run.out_dir")


def _overlap(path: Path, place: Path) -> str | None:
    path, place = (Path(os.path.realpath(one)) for one in (path, place))
    if path == place:
        return "is"
    if path.is_relative_to(place):
        return "contains"
    return "lies in" if place.is_relative_to(path) else None


def _refuse_foreign(folder: Path) -> None:
    """Spares names that an attempt left before its first step."""
    if not folder.is_dir():
        return  # absent, or refused by the lock
    is_attempts = _is_marked(folder) and not _has_left(folder)
    for entry in sorted(folder.iterdir()):
        if matches(entry.name, WRITTEN) and not (is_attempts and matches(entry.name, _KEPT_BY_AN_ATTEMPT)):
            what = f"holds {entry.name}, which a run would write over"
            raise UserError(f"run.out_dir: {folder} {what}; give another --run.out_dir")


def _is_marked(folder: Path) -> bool:
    lock = folder / ".lock"
    return lock.is_file() and lock.read_bytes()[: len(_MARK)] == _MARK.encode()


# ── has a run begun here? ───────────────────────────────────────────────────────────────────────────────────


def has_begun(folder: Path) -> bool:
    """False before a first step, evaluation or checkpoint."""
    return _has_left(folder) and (folder / "config.json").exists()


def _has_left(folder: Path) -> bool:
    files = (folder / name for name in ("metrics.jsonl", "evaluations.jsonl"))
    has_lines = any(file.is_file() and file.stat().st_size for file in files)
    return has_lines or any(folder.glob("checkpoints/step-*"))


def can_go_on(folder: Path) -> bool:
    """True also with nothing but responses."""
    return has_begun(folder) or _has_journal(folder)


def _has_journal(folder: Path) -> bool:
    return any(path for step in step_folders(folder / "journal") for path in step.glob(JOURNAL_FILES[0]))


def step_folders(folder: Path) -> Iterator[Path]:
    return folder.glob("step-" + "[0-9]" * 8)


def forget_journal(folder: Path) -> bool:
    """Returns whether there were any files."""
    had_any = _has_journal(folder)
    for step in step_folders(folder / "journal"):
        remove_own(step, JOURNAL_FILES)
    remove_own(folder / "journal", ())
    return had_any


def refuse_begun(folder: Path) -> None:
    """UserError if a run has begun."""
    if has_begun(folder) and (_is_marked(folder) or _describes_run(folder / "config.json")):
        raise UserError(
            f"run.out_dir: {folder} holds a run already;"
            f" continue it with tlt train --resume {quoted(folder)}, or give another --run.out_dir"
        )


def _describes_run(config: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        sections = parse_json(read_file(config).decode())
        return isinstance(sections, dict) and {"run", "model", "task"} <= sections.keys()
    return False


class FolderLock:
    """A kernel lock, until `release` or the process's end. Makes and marks the folder. Raises UserError."""

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
        except OSError as error:
            self.release()
            raise _lacks_locks_or_appends(folder, error) from None
        if self._file.tell() == 0:
            with contextlib.suppress(OSError):  # of a full disk, the first file that matters tells
                self._file.write(_MARK)
                self._file.flush()
        try:
            self._check_appends()
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                self.release()
                raise _lacks_locks_or_appends(folder, error) from None

    def _check_appends(self) -> None:
        """Raises OSError where appending loses a file's contents."""
        path = self._folder / ".lock"
        before = path.stat().st_size
        try:
            for size in (before + 1, before + 2):
                with path.open("a") as file:
                    file.write("\n")
                if (found := path.stat().st_size) != size:
                    raise OSError(f"of {size} bytes {found} were kept")
        finally:
            with contextlib.suppress(OSError):
                os.truncate(path, before)

    def check(self) -> None:
        """UserError if the folder has been removed or replaced."""
        try:
            is_there = os.path.samestat(os.fstat(self._opened), os.stat(self._folder))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise _removed(self._folder)

    def release(self) -> None:
        if not self._file.closed:
            self._file.close()
            os.close(self._opened)


def explain_os_error(error: OSError, folder: Path) -> UserError | None:
    """None: due to neither folder nor disk."""
    named = Path(error.filename) if isinstance(error.filename, str | Path) else None
    is_inside = named is not None and named.is_relative_to(folder)
    if error.errno == errno.ENOENT and not folder.exists():
        return _removed(folder)
    if error.errno in _DISK_ERRORS or (error.errno in _IN_THE_WAY and is_inside):
        reason = error.strerror or str(error)
        remedy = f"{way_out(reason)}, then tlt train --resume {quoted(folder)}"
        return UserError(f"{named or folder}: cannot be written ({reason}); {remedy}")
    return None


def _lacks_locks_or_appends(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"run.out_dir: {folder} lies on a file system without locks or without appending "
        f"({error.strerror or error}), as mounted buckets are; give one on a disk, a volume or NFS"
    )


def _removed(folder: Path) -> UserError:
    return UserError(
        f"run.out_dir: {folder} has been removed, or moved, under the run; bring it back, "
        f"then tlt train --resume {quoted(folder)}, or begin a new run"
    )

"""The user's files, written whole or not at all.

    write_atomically   a text file    temporary neighbour → flushed → renamed to its place
    replace_folder     a folder       temporary neighbour → every file in it flushed → renamed to its place

Both follow symlinks.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

from tlt.base.types import UserError

Record = dict[str, Any]
T = TypeVar("T")


# ------------------------------------------------------------------------------------------------------------
# Writing


def check_output_file(path: Path | None, option: str) -> None:
    """Raises UserError for an output that could not be written at the end."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option}: {path} is a folder; give the name of a file")
    _refuse_no_file(path, option)
    folder = next(parent for parent in path.resolve().parents if os.path.exists(parent))
    if not folder.is_dir():
        raise UserError(f"{option}: {folder} is no folder; give another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{option}: the folder {folder} is not writable; give another path")


def with_folder(path: Path) -> Path:
    try:
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def check_new_folder(path: Path, option: str) -> None:
    """Raises UserError for an output folder that exists or cannot be made."""
    if path.exists() or path.is_symlink():
        raise UserError(f"{option}: {path} exists; give the name of a new folder")
    check_output_file(path, option)


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[TextIO]:
    """Raises UserError if the file cannot be written."""
    _refuse_no_file(path, str(path))
    target = path.resolve()
    partial: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        partial = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        set_usual_mode(partial)
        partial.replace(target)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)  # gone after the rename


def set_usual_mode(path: Path) -> None:
    """tempfile makes a file readable by its owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


@contextlib.contextmanager
def replace_folder(path: Path, own: Sequence[str]) -> Iterator[Path]:
    """Yields a new folder to fill, which replaces `path` at the end; a crash between the two renames leaves
    the older folder at `.NAME.old`. Raises UserError where the folder cannot be written, or the older one
    holds files that no pattern in `own` matches."""
    path = path.resolve()
    for folder in (path, *_neighbours(path)):
        check_replaceable(folder, own)
    new, old = _neighbours(path)
    try:
        remove_own(new, own)  # left behind by a writer that was killed
        new.mkdir(parents=True)
        yield new
        for item in (*new.rglob("*"), new):
            flush(item)
        if path.exists():
            remove_own(old, own)
            path.rename(old)
        new.rename(path)
        flush(path.parent)
        remove_own(old, own)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        remove_own(new, own)  # gone after the rename


def _neighbours(path: Path) -> tuple[Path, Path]:
    return path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")


def check_replaceable(folder: Path, own: Sequence[str]) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file, where a folder is written; move it away, or give another path")
    for entry in sorted(folder.iterdir()):
        if not matches(entry.name, own):
            what = f"holds {entry.name}, which replacing the folder would remove"
            raise UserError(f"{folder}: {what}; move {entry.name} away, or give a new or empty folder")


def remove_own(folder: Path, own: Sequence[str]) -> bool:
    """Removes the entries that match `own`. Returns whether the folder is gone."""
    with contextlib.suppress(OSError):  # what cannot be removed stays
        for entry in folder.iterdir():
            if not matches(entry.name, own):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
        folder.rmdir()
    return not os.path.lexists(folder)


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def flush(path: Path) -> None:
    """Otherwise a rename may outlive the contents in a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with write_atomically(path) as file:
        file.writelines(dumps(record) + "\n" for record in records)


def write_json(path: Path, value: Any) -> None:
    with write_atomically(path) as file:
        file.write(dumps(value, indent=1) + "\n")


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities become null, NumPy and torch scalars plain numbers."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)
    except (ValueError, TypeError):  # it holds such a value
        return json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, str | int | float | None) and callable(getattr(value, "item", None)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _refuse_no_file(path: Path, place: str) -> None:
    """A rename would replace a device or pipe."""
    is_stream = str(path.absolute()).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    if is_stream or (path.exists() and not path.is_file()):
        raise UserError(f"{place}: {path} is no regular file; give the name of a file")


def _unwritable(path: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(f"{path}: cannot be written ({reason}); {way_out(reason)} or give another path")


def way_out(reason: str) -> str:
    return next((remedy for code, remedy in _WAYS_OUT.items() if os.strerror(code) in reason), "make room")


_WAYS_OUT: Final = {
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "move away what lies in its place"),
    errno.ENOENT: "bring its folder back",
}


# ------------------------------------------------------------------------------------------------------------
# Reading


def parse_json(text: str) -> Any:
    """Raises ValueError for invalid JSON, too deep nesting, and lone surrogates, which UTF-8 cannot
    encode."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\ud" in text.lower() and has_lone_surrogate(value):
        raise ValueError("an escape such as \\ud83d stands without its other half")
    return value


def has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (TypeError, ValueError, RecursionError):
        return False
    return False


def refuse_endless(value: Any) -> None:
    """Raises ValueError for NaN, infinities and integers of more than 18 digits."""
    items = [value]
    while items:
        item = items.pop()
        if isinstance(item, dict):
            items += item.values()
        elif isinstance(item, list):
            items += item
        elif isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{item} is no number")
        elif isinstance(item, int) and abs(item) >= 10**18:
            raise ValueError("a whole number has more than 18 digits")


def read_jsonl(path: Path, option: str) -> list[tuple[str, Record]]:
    """Returns (place "file:line", record) pairs. Raises UserError for an empty file and for lines other than
    JSON objects."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # "-sig" skips some editors' byte-order mark
    except FileNotFoundError:
        raise UserError(f"{option}: {path} does not exist; give the path of a JSONL file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option}: {path} cannot be read ({error}); give the path of a JSONL file") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            reason: object = error
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg}, column {error.colno}"
            raise UserError(f"{place}: not valid JSON ({reason}); write one object per line") from None
        if not isinstance(record, dict):
            raise UserError(f"{place}: holds a {type(record).__name__}; write one object per line")
        records.append((place, record))
    if not records:
        raise UserError(f"{option}: {path} is empty; give at least one line")
    return records


def check_is_file(path: Path) -> None:
    """Raises OSError for devices and pipes, which may have no end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "is no file", str(path))


def read_file(path: Path) -> bytes:
    check_is_file(path)
    return path.read_bytes()


def read_appended(path: Path, parse: Callable[[str], T], kind: str) -> list[T]:
    """Parses the lines of a file that a run appends to. A last line cut off by a kill is dropped. Raises
    UserError where `parse` refuses any other line."""
    try:
        lines = read_file(path).decode().split("\n")[:-1] if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); repair the file, or move it away") from None
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(parse(line))
        except (ValueError, TypeError, RecursionError) as error:
            what = f"no {kind} ({' '.join(str(error).split())[:200]})"
            raise UserError(f"{path}, line {number}: {what}; repair or remove the line") from None
    return parsed


def get_id(place: str, record: Record, default: str | None = None) -> str:
    value = record.get("problem_id", default)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise UserError(f"{place}: problem_id is {value!r}; it must be text that names the problem")
    return value


def line_number(place: str) -> str:
    return place.rpartition(":")[2]

"""The user's files: checked before work begins, read with their line numbers, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from tlt.types import UserError

Record = dict[str, Any]


def check_output_file(path: Path, option: str) -> None:
    """Refuses, before any work, an output that could not be written at the end."""
    folder = path.absolute().parent
    if path.is_dir():
        raise UserError(f"{option}: {path} is a folder; give the name of a file")
    if not folder.is_dir():
        raise UserError(f"{option}: the folder {folder} does not exist; create it or give another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{option}: the folder {folder} is not writable; give another path")


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[TextIO]:
    """A text file that appears at `path` complete, or not at all: a temporary file beside it, renamed at the end."""
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp's 0600 would follow the file to its place
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """A folder that appears at `path` complete, or not at all: fill the one yielded, a neighbour; it is flushed to the disk and
    renamed at the end. A folder that was there leaves only then; a crash between two renames leaves it at `.NAME.old`."""
    path = path.absolute()
    new, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    shutil.rmtree(new, ignore_errors=True)  # left behind by a writer that was killed
    new.mkdir(parents=True)
    try:
        yield new
        for file in (*new.rglob("*"), new):
            flush(file)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    new.rename(path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """To the disk, so that a rename never outlives the contents it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def dumps(value: Any) -> str:
    """Returns JSON that every reader takes: NaN and infinities become null, numpy and torch scalars plain numbers."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, str | int | float | None) and callable(getattr(value, "item", None)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with write_atomically(path) as file:
        file.writelines(dumps(record) + "\n" for record in records)


def read_jsonl(path: Path, option: str) -> list[tuple[str, Record]]:
    """Every record with its place ("file:line"). Blank lines are skipped; a file without records is refused."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
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
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not valid JSON ({error.msg}, column {error.colno}); write one object per line") from None
        if not isinstance(record, dict):
            raise UserError(f"{place}: holds a {type(record).__name__}; write one object per line")
        records.append((place, record))
    if not records:
        raise UserError(f"{option}: {path} is empty; give at least one line")
    return records


def get_id(place: str, record: Record, default: str | None = None) -> str:
    """The record's problem_id; whole numbers count as text."""
    value = record.get("problem_id", default)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise UserError(f"{place}: problem_id is {value!r}; it must be text that names the problem")
    return value

"""Reads the user's rows as JSON records.

    file.jsonl · folder of them ───────────────────────── read here ─┐
    file.parquet · folder · save_to_disk ── datasets ────────────────┼─▶ our names ─▶ (place, record)
    OWNER/NAME[@REVISION] ── datasets ──▶ JSONL in the hub's cache ──┘

Ranks and later runs read the cached JSONL without a network and `datasets`.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

from tlt.base.io.extras import how_to_install
from tlt.base.io.files import Record, line_number, parse_json, read_jsonl, write_jsonl
from tlt.base.io.hub import Repository, pin_dataset, quiet
from tlt.base.io.text import one_line
from tlt.base.types import UserError

PROMPTS = ("prompt", "prompt_ids", "messages")
"""Columns of a prompt: text, token ids or chat messages. As in TRL and verl, `prompt` may be messages."""
_SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}

_SAVED = ("dataset_dict.json", "state.json")
"""Mark a folder of save_to_disk."""
_ROWS = re.compile(r"\[(-?\d*):(-?\d*)\]$")

Records = list[tuple[str, Record]]
"""(place for errors, such as "file:line"; record)"""


@dataclass(frozen=True)
class DataSource:
    name: Path
    option: str
    """The option or key that named the data, for errors."""
    subset: str | None = None
    split: str | None = None
    """None: the only split, or `usual_split` where there are several."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our column name → the data's."""
    usual_split: str = "train"

    def __str__(self) -> str:
        parts = ", ".join(filter(None, (self.subset, self.split)))
        return f"{self.name} ({parts})" if parts else str(self.name)


def read_data(source: DataSource) -> Records:
    """Returns rows with our column names. Raises UserError for unreadable data.

    A row without problem_id gets its line in a JSONL file, else its number in the source, from 1.
    """
    return [(place, _rename(place, record, source.columns)) for place, record in _read(source)]


def _read(source: DataSource) -> Records:
    path, option = source.name, source.option
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if files and not any(path.glob("*.parquet")):
            split, rows = _split_and_rows(source)
            chosen = _files_of_split(files, replace(source, split=split))
            return _number(pair for file in chosen for pair in read_jsonl(file, option))[rows]
        return _number(_rows(_load_folder(source), source))
    if not path.exists() and (repository := Repository.parse(path)) is not None:
        return _read_repository(source, repository)
    is_train = source.split is None or source.split.partition("[")[0] == "train"
    if source.subset is not None or not is_train:
        what = f"{path} is one file, which has no subset, and no split but train"
        raise UserError(f"{option}: {what}; remove {source.subset or source.split}")
    if path.suffix == ".parquet":
        return _number(_rows(_load(source, "parquet", data_files=str(path)), source))
    _, rows = _split_and_rows(source)
    records = read_jsonl(path, option)
    return [(place, {"problem_id": line_number(place), **record}) for place, record in records][rows]


def _split_and_rows(source: DataSource) -> tuple[str | None, slice]:
    name, bracket, _ = (source.split or "").partition("[")
    if not bracket:
        return source.split, slice(None)
    if (found := _ROWS.search(source.split or "")) is None:
        what = f"split {source.split!r} names no rows of a JSONL file"
        raise UserError(f"{source.option}: {what}; write them as train[:1000] or train[-64:]")
    return name, slice(*(int(text) if text else None for text in found.groups()))


def names_rows(source: DataSource) -> bool:
    return not any((source.name / name).is_file() for name in _SAVED)


def list_splits(source: DataSource) -> tuple[str, ...]:
    path = source.name
    if path.is_file() or (path / "state.json").is_file():
        return ("train",)
    if (path / "dataset_dict.json").is_file():
        return tuple(parse_json((path / "dataset_dict.json").read_text())["splits"])
    if path.is_dir() and any(path.glob("*.jsonl")) and not any(path.glob("*.parquet")):
        words = {word for file in path.glob("*.jsonl") for word in re.split(r"\W|_", file.stem)}
        return tuple(sorted(words & _SPLITS)) or ("train",)
    pinned = None if path.exists() else pin_dataset(path)
    name, revision = (str(path), None) if pinned is None else (pinned.name, pinned.revision)
    datasets = _import_datasets(source)
    try:
        with quiet():
            found = datasets.get_dataset_split_names(name, source.subset, revision=revision)
    except Exception as error:  # as for load_dataset
        raise _unreadable(source, error) from None
    return tuple(found)


def _number(records: Iterable[tuple[str, Record]]) -> Records:
    numbered = enumerate(records, start=1)
    return [(place, {"problem_id": str(number), **record}) for number, (place, record) in numbered]


def _rename(place: str, record: Record, columns: Mapping[str, str]) -> Record:
    """A column renamed to a prompt column displaces the data's other prompt columns."""
    for theirs in columns.values():
        if theirs not in record:
            known = ", ".join(name for name in record if name != "problem_id")
            remedy = "correct the names of columns that are set"
            raise UserError(f"{place}: has no column {theirs!r}; columns are {known}: {remedy}")
    gone = {*columns.values(), *(PROMPTS if columns.keys() & set(PROMPTS) else ())}
    kept = {name: value for name, value in record.items() if name not in gone}
    return kept | {ours: record[theirs] for ours, theirs in columns.items()}


def _files_of_split(files: Sequence[Path], source: DataSource) -> list[Path]:
    """gsm8k-train-2.jsonl is of the split train; if no name tells a split, all files are training data."""
    words = {file: {*re.split(r"\W|_", file.stem)} for file in files}
    split = source.split or source.usual_split
    chosen = [file for file in files if split in words[file]]
    if not chosen and split == "train" and not set().union(*words.values()) & _SPLITS:
        return list(files)
    if not chosen or source.subset is not None:
        wrong = f"split {split!r}" if not chosen else f"subset {source.subset!r}"
        known = ", ".join(file.name for file in files)
        raise UserError(f"{source.option}: {source.name} has no {wrong}; its files are {known}")
    return chosen


# ── datasets ────────────────────────────────────────────────────────────────────────────────────────────────


def _read_repository(source: DataSource, repository: Repository) -> Records:
    from huggingface_hub import cached_assets_path

    pinned = pin_dataset(source.name)
    assert pinned is not None, "the name is a repository's"
    folder = cached_assets_path("tlt", namespace=pinned.name, subfolder=str(pinned.revision))
    name = f"{source.subset or 'default'} {source.split or f'usual {source.usual_split}'}.jsonl"
    file = Path(folder) / quote(name, safe="")
    if not file.exists():
        rows = _load(source, pinned.name, revision=pinned.revision, name=source.subset)
        _check_commit(rows, pinned, source)
        write_jsonl(file, (record for _, record in _rows(rows, source)))
    numbered = enumerate(read_jsonl(file, source.option), start=1)
    return _number((f"{source}, row {number}", record) for number, (_, record) in numbered)


def _check_commit(rows: Any, pinned: Repository, source: DataSource) -> None:
    """Offline, `datasets` takes the latest cached commit: refuse it unless it is the pinned one."""
    parts = {part for file in rows.cache_files for part in Path(file["filename"]).parts}
    commits = {part for part in parts if re.fullmatch("[0-9a-f]{40}", part)}
    if commits and pinned.revision not in commits:
        found = f"only commit {commits.pop()} of {pinned.name} is in the cache, not {pinned.revision}"
        remedy = "check the network, and HF_HUB_OFFLINE"
        raise UserError(f"{source.option}: {source} cannot be loaded ({found}); {remedy}")


def _load_folder(source: DataSource) -> Any:
    path = str(source.name)
    if names_rows(source):
        return _load(source, path, name=source.subset)
    if source.subset is not None:
        what = f"{path} was written by save_to_disk and has no subset"
        raise UserError(f"{source.option}: {what}; remove {source.subset!r}")
    datasets = _import_datasets(source)
    try:
        loaded = datasets.load_from_disk(path)
    except Exception as error:  # a broken file may raise anything
        raise _unreadable(source, error) from None
    split, rows = _split_and_rows(source)
    is_single = isinstance(loaded, datasets.Dataset)
    if is_single and split is not None:
        raise UserError(f"{source.option}: {path} has no splits; remove {source.split!r}")
    chosen = loaded if is_single else _choose_split(loaded, replace(source, split=split))
    return chosen.select(range(len(chosen))[rows])


def _load(source: DataSource, *arguments: str, **options: Any) -> Any:
    datasets = _import_datasets(source)
    try:
        with quiet(), _bars_on_terminals(datasets):
            loaded = datasets.load_dataset(*arguments, split=source.split, **options)
    except Exception as error:  # `datasets` has dozens of kinds for a wrong name, network or file
        raise _unreadable(source, error) from None
    return loaded if source.split is not None else _choose_split(loaded, source)


def _choose_split(loaded: Mapping[str, Any], source: DataSource) -> Any:
    split = source.split or (next(iter(loaded)) if len(loaded) == 1 else source.usual_split)
    if split not in loaded:
        what = f"{source.name} has no split {split!r}; its splits are {', '.join(loaded)}"
        raise UserError(f"{source.option}: {what}: set one")
    return loaded[split]


def _import_datasets(source: DataSource) -> ModuleType:
    try:
        import datasets
    except ImportError:
        what = f"{source.name} needs the package datasets (JSONL does not)"
        raise UserError(f"{source.option}: {what}; {how_to_install('data')}") from None
    package: ModuleType = datasets  # Any, for mypy, where it is not installed
    return package


@contextlib.contextmanager
def _bars_on_terminals(datasets: ModuleType) -> Iterator[None]:
    hides = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if hides:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            datasets.enable_progress_bars()


def _unreadable(source: DataSource, error: Exception) -> UserError:
    is_network = isinstance(error, ConnectionError) or type(error).__module__.startswith("http")
    remedy = "check the network, and HF_HUB_OFFLINE" if is_network else "correct its name, subset or split"
    return UserError(f"{source.option}: {source} cannot be loaded ({one_line(error, 240)}); {remedy}")


def _rows(rows: Iterable[Mapping[str, Any]], source: DataSource) -> Iterator[tuple[str, Record]]:
    for number, row in enumerate(rows, start=1):
        place = f"{source}, row {number}"
        record = {}
        for column, value in row.items():
            try:
                record[column] = to_json(value)
            except TypeError as error:
                what = f"column {column!r} holds {error}, which is no text, number or list"
                raise UserError(f"{place}: {what}: remove the column") from None
        yield place, record


def to_json(value: Any) -> Any:
    """Dates become ISO 8601, decimals text, NaN null. Raises TypeError for other types.

    A struct's null keys are left out: Parquet gives all rows the keys of each, of a tool's arguments too.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if type(value).__module__ == "numpy":
        return to_json(value.tolist())
    raise TypeError(type(value).__name__)

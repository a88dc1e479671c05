"""Tables of configurations and machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

from tlt.apps.page.gather import RunRecords
from tlt.apps.page.summary import NOTHING, Cell, Table
from tlt.base.config.schema import Config
from tlt.base.io.files import Record, dumps

_ABSENT = object()
_NOT_COMPARED = ("run.out_dir",)
"""Keys that differ between any two runs."""
MAX_CHARACTERS = 500


def differing_keys(runs: Sequence[RunRecords]) -> Table:
    keys = [key for key in _keys(runs) if key not in _NOT_COMPARED and len(_texts(runs, key)) > 1]
    note = "" if keys else "The runs have equal configurations."
    return Table([run.name for run in runs], _rows(runs, keys), note)


def changed_keys(runs: Sequence[RunRecords]) -> Table:
    """Lists keys that differ from TLT's defaults in any run."""
    rows = _rows(runs, [key for key in _keys(runs) if _is_changed(runs, key)])
    heads = [*(run.name for run in runs), "default"]
    return Table(heads, [(key, [*cells, Cell(_default_text(key))]) for key, cells in rows])


def default_keys(runs: Sequence[RunRecords]) -> Table:
    return Table(
        [run.name for run in runs], _rows(runs, [key for key in _keys(runs) if not _is_changed(runs, key)])
    )


def machines(runs: Sequence[RunRecords]) -> Table | None:
    names = list(
        dict.fromkeys(name for run in runs for one in run.environments for name in one if name != "began")
    )
    rows = [(name, [Cell(_over_attempts(run.environments, name)) for run in runs]) for name in names]
    return Table([run.name for run in runs], rows) if rows else None


def _over_attempts(environments: Sequence[Record], name: str) -> str:
    texts = [_text(one.get(name)) for one in environments]
    return " → ".join(text for i, text in enumerate(texts) if not i or texts[i - 1] != text) or NOTHING


def _is_changed(runs: Sequence[RunRecords], key: str) -> bool:
    return _texts(runs, key) != {_default_text(key)}


def _rows(runs: Sequence[RunRecords], keys: Sequence[str]) -> list[tuple[str, list[Cell]]]:
    return [(key, [Cell(_value_text(run, key)) for run in runs]) for key in keys]


def _keys(runs: Sequence[RunRecords]) -> list[str]:
    found = (f"{section}.{key}" for run in runs for section, keys in run.config.items() for key in keys)
    return list(dict.fromkeys(found))


def _texts(runs: Sequence[RunRecords], key: str) -> set[str]:
    return {_value_text(run, key) for run in runs}


def _value_text(run: RunRecords, key: str) -> str:
    value = run.setting(key, _ABSENT)
    return NOTHING if value is _ABSENT else _text(value)


def _default_text(key: str) -> str:
    value = _defaults().get(key, _ABSENT)
    return NOTHING if value is _ABSENT else _text(value)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else dumps(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"


@cache
def _defaults() -> Mapping[str, Any]:
    sections = ((name, field.annotation) for name, field in Config.model_fields.items())
    return {
        f"{name}.{key}": value
        for name, section in sections
        if isinstance(section, type) and issubclass(section, BaseModel)
        for key, value in section.model_construct().model_dump(mode="json").items()
    }

"""Loads a configuration from a TOML file, a recipe by name or a dict, with overrides on top. Knows no meaning
of a key.

    defaults of schema.py ◀ quickstart.toml ◀ --section.key value          later wins

Every mistake is one `UserError` line that names the place, the value and the remedy; nothing that is misspelt
is ignored.

Paths: a relative path in a TOML file is taken from that file's folder if it exists there, else from the
working directory. A relative path in an override, and `run.out_dir` always, is taken from the working
directory. The resolved configuration holds absolute paths, so it means the same in every process and for
`--resume`; a relative one in it is the name of a repository of the Hugging Face hub.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.config.arguments import read_words
from tlt.config.mistakes import Keys, section_of, validate
from tlt.config.schema import DEFAULT_OUT_DIR, Config
from tlt.io.hub import Repository
from tlt.io.recipes import resolve_config
from tlt.io.secrets import holds_credential
from tlt.kinds import shorten
from tlt.types import UserError

_PATH_KEYS = (
    ("model", "path"),
    ("model", "adapter"),
    ("task", "data"),
    ("drafter", "path"),
    ("evaluation", "data"),
)
_SOURCES_OF_PROBLEMS = {("task", "num_problems"): "data", ("task", "data"): "num_problems"}
_RENAMED: dict[Keys, Keys] = {("task", "problems_file"): ("task", "data")}

MAX_DEPTH = 64
"""Tables that may lie in each other."""
_DEEP_KEY = re.compile(
    rf"""^[ \t]*\[{{0,2}}(?:[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.){{{MAX_DEPTH}}}""", re.MULTILINE
)
"""A key that tomllib takes a time for that grows with the square of its parts."""


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Config:
    """Returns the configuration that `source` holds, with `overrides` on top.

    source: a TOML file (or resolved JSON file), a recipe's name such as "countdown", or the sections
        themselves.
    overrides: words of a command line, `--section.key value`, or {"section.key": value}.

    Raises UserError, one line, for a file that is missing or no TOML, a key that is unknown (the nearest
    is suggested), a value of the wrong type or out of range, an override without a value, and a path that
    leads nowhere.
    """
    if not isinstance(source, str | Path | Mapping):
        raise UserError(
            f"config: is {shorten(source)}; give a TOML file, the name of a recipe, or a dict of sections"
        )
    if isinstance(source, Mapping):
        file, folder, values = "config", Path(), _copy(source)
    else:
        path = resolve_config(Path(source))
        file, folder, values = str(path), path.parent, _read_file(path)
    for (section, old), (_, new) in _RENAMED.items():
        if isinstance(table := values.get(section), dict) and old in table and new not in table:
            table[new] = table.pop(old)
    for section, key in _PATH_KEYS:
        if isinstance(table := values.get(section), dict) and isinstance(text := table.get(key), str | Path):
            table[key] = _resolve(str(text), folder)
    places: dict[Keys, str] = {}
    for override in read_overrides(overrides):
        _assign(values, override)
        places[override.keys] = override.place
    _refuse_unwritable(values, file, places)
    run = values.setdefault("run", {})
    if isinstance(run, dict) and isinstance(
        out_dir := run.setdefault("out_dir", str(DEFAULT_OUT_DIR)), str | Path
    ):
        run["out_dir"] = _absolute(str(out_dir))
    if isinstance(rollout := values.get("rollout"), dict) and isinstance(
        replay := rollout.get("replay"), str | Path
    ):
        rollout["replay"] = _absolute(str(replay))
    config = validate(Config, values, file, places)
    _check_paths(config, file, places)
    return config


def _copy(source: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return copy.deepcopy(dict(source))
    except RecursionError:
        raise UserError(
            f"config: holds tables more than {MAX_DEPTH} deep in each other; flatten them"
        ) from None


def _refuse_unwritable(value: Any, file: str, places: Mapping[Keys, str], keys: Keys = ()) -> None:
    """Refuses what cannot be written into the run's config.json: tables that are nested too deeply, and
    credentials, which it would also show to its trackers and which the error does not repeat."""
    if len(keys) > MAX_DEPTH:
        raise UserError(
            f"{file}: {'.'.join(keys[:3])}… holds tables more than {MAX_DEPTH} deep in each other; flatten "
            "them"
        )
    if isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _refuse_unwritable(item, file, places, (*keys, str(key)))
    elif isinstance(value, str | Path) and holds_credential(str(value)):
        place, remedy = (
            places.get(keys, file),
            "remove it, and have the code that needs it read it from the environment",
        )
        raise UserError(
            f"{place}: {'.'.join(keys)} holds a password or token, which the run would write down; {remedy}"
        )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(
            encoding="utf-8-sig"
        )  # "-sig": some editors begin a file with a byte-order mark
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a TOML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give the path of a TOML configuration") from None
    if path.suffix != ".json" and (deep := _DEEP_KEY.search(text)) is not None:
        line = text.count("\n", 0, deep.start()) + 1
        raise UserError(f"{path}: line {line} has a key of more than {MAX_DEPTH} parts; flatten it")
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be parsed ({error}); correct that place") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no configuration; it must be a table of sections")
    return values


def _resolve(text: str, folder: Path) -> str:
    """Returns an absolute path: from `folder` if it exists there, else from the working directory; or the
    name of a repository of the hub where there is no such path."""
    for path in (folder / text, Path(text)) if text.strip() else ():
        with suppress(OSError):  # a name that no file can have is refused with the others
            if path.exists():
                return str(path.absolute())
    return text if Repository.parse(text) is not None else _absolute(text)


def _absolute(text: str) -> str:
    """Returns the path from the working directory. An empty one stays, to be refused: as a path it would
    be that directory."""
    return str(Path(text).absolute()) if text.strip() else text


def _check_paths(config: Config, file: str, places: Mapping[Keys, str]) -> None:
    """Refuses inputs that lead nowhere now, not after the ranks have started."""
    for section, key in _PATH_KEYS:
        path: Path | None = getattr(getattr(config, section), key)
        if path is None or Repository.parse(path) is not None:
            continue
        if not (path.is_dir() if key in ("path", "adapter") else path.exists()):
            kind, name = (
                ("folder", "a model's name")
                if key in ("path", "adapter")
                else ("file or folder", "a dataset's name")
            )
            remedy = f"there is no such {kind}: give one that exists, or {name} on the Hugging Face hub, OWNER/NAME"
            raise UserError(f"{places.get((section, key), file)}: {section}.{key} is {path}; {remedy}")


# ------------------------------------------------------------------------------------------------------------
# Overrides


@dataclass(frozen=True)
class Override:
    """A value that replaces the file's. place: how the user wrote it, such as --run.seed."""

    place: str
    keys: Keys
    value: Any


def read_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> list[Override]:
    """Reads {"section.key": value}, or words `--section.key value`. Text is read as the key wants it."""
    if not isinstance(overrides, Mapping | list | tuple) or not all(
        isinstance(word, str) for word in overrides
    ):
        raise UserError(
            f"overrides: is {shorten(overrides)}; give a dict such as {{'run.num_steps': 20}}, or a list of "
            "words"
        )
    if isinstance(overrides, Mapping):
        return [_read_override(f"overrides[{name!r}]", name, value) for name, value in overrides.items()]
    alone, named = read_words(overrides)
    for word in alone:
        raise UserError(f"{word}: unexpected argument; an override is written --section.key value")
    return [_read_override(f"--{name}", name, text) for name, text in named.items()]


def _read_override(place: str, name: str, value: Any) -> Override:
    keys = tuple(name.split("."))
    keys = _RENAMED.get(keys, keys)
    if len(keys) < 2 or not all(keys):
        raise UserError(
            f"{place}: unknown option; an override is written --section.key value, such as --run.seed 1"
        )
    if len(keys) > MAX_DEPTH:
        raise UserError(f"{shorten(place)}: names a key of more than {MAX_DEPTH} parts; flatten it")
    if isinstance(value, Path):
        value = str(value)
    return Override(place, keys, _parse_value(keys, value) if isinstance(value, str) else value)


def _parse_value(keys: Keys, text: str) -> Any:
    """Returns an override's value. Text stays text where the key takes text or a path; elsewhere it reads
    as in TOML, or as the JSON object that `tlt task --options` takes. `none` unsets an optional key."""
    accepted = set(_accepted_types(keys))
    if "null" in accepted and text.lower() == "none":
        return None
    if "path" in accepted:
        return _resolve(text, Path()) if keys in _PATH_KEYS else _absolute(text)
    if "string" in accepted and "integer" not in accepted:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        with suppress(ValueError, RecursionError):
            return json.loads(text) if text.startswith("{") else text
        return text


def _accepted_types(keys: Keys) -> Iterable[str]:
    """Yields the JSON types that a key accepts, and "path"; nothing for an unknown key and for a task's
    own options."""
    if keys[0] not in Config.model_fields or len(keys) != 2:
        return
    described = section_of(Config, keys[0]).model_json_schema()["properties"].get(keys[1], {})
    for branch in described.get("anyOf", [described]):
        yield branch.get("format") or branch.get("type", "")


def _assign(values: dict[str, Any], override: Override) -> None:
    keys, table = override.keys, values
    for depth, key in enumerate(keys[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise UserError(
                f"{override.place}: {'.'.join(keys[:depth])} is a value, not a table; override it itself"
            )
    # One source of problems replaces the other: an override is the user's latest word.
    if keys in _SOURCES_OF_PROBLEMS and override.value is not None:
        table.pop(_SOURCES_OF_PROBLEMS[keys], None)
    table[keys[-1]] = override.value

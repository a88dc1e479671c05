"""Loads a configuration from a TOML file, a recipe or a dict, with overrides on top.

    defaults of schema.py ◀ quickstart.toml ◀ --section.key value          later wins

Paths: a relative path in a TOML file is taken from that file's folder if it exists there, else from the
working directory. A relative path in an override, and `run.out_dir` always, is taken from the working
directory. The resolved configuration holds absolute paths; a relative one in it names a repository of the
hub.
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

from tlt.base.config.arguments import read_words
from tlt.base.config.elsewhere import find_elsewhere
from tlt.base.config.environment import EnvironmentSection
from tlt.base.config.mistakes import Keys, section_of, suggest_key, validate
from tlt.base.config.schema import DEFAULT_OUT_DIR, Config
from tlt.base.config.section import Section, split_words
from tlt.base.io.hub import Repository
from tlt.base.io.plugins import file_in
from tlt.base.io.recipes import find_config
from tlt.base.io.secrets import holds_credential
from tlt.base.types import UserError
from tlt.base.value_types import shorten

_PATH_KEYS = (
    ("model", "path"),
    ("model", "adapter"),
    ("task", "data"),
    ("drafter", "path"),
    ("evaluation", "data"),
)
_OUTPUT_KEY = "run", "out_dir"
"""A path that is taken from the working directory, wherever it is written."""
_SOURCES_OF_PROBLEMS = {("task", "num_problems"): "data", ("task", "data"): "num_problems"}

MAX_DEPTH = 64
"""Largest number of tables within each other."""
_DEEP_KEY = re.compile(
    rf"""^[ \t]*\[{{0,2}}(?:[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.){{{MAX_DEPTH}}}""", re.MULTILINE
)
"""Finds keys of more parts: tomllib's time for one grows with the square of their number."""


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Config:
    """Raises UserError for any mistake.

    source: a TOML file, the config.json of a run, a recipe's name such as "countdown", or a dict of sections.
    overrides: words of a command line, `--section.key value`, or {"section.key": value}.
    """
    if not isinstance(source, str | Path | Mapping):
        raise UserError(
            f"config: is {shorten(source)}; give a TOML file, the name of a recipe, or a dict of sections"
        )
    if isinstance(source, Mapping):
        file, folder, values = "config", Path(), _copy(source)
    else:
        path = find_config(Path(source))
        file, folder, values = str(path), path.parent, _read_file(path)
    if isinstance(run := values.setdefault("run", {}), dict):
        run.setdefault("out_dir", str(DEFAULT_OUT_DIR))
    for section, key in (*_PATH_KEYS, _OUTPUT_KEY):
        if isinstance(table := values.get(section), dict) and isinstance(text := table.get(key), str | Path):
            table[key] = _resolve((section, key), str(text), folder)
    _resolve_code(values, folder)
    places: dict[Keys, str] = {}
    for override in read_overrides(overrides):
        _assign(values, override)
        places[override.keys] = override.place
    _resolve_code(values, Path())
    _refuse_unwritable(values, file, places)
    config = validate(Config, values, file, places)
    _check_paths(config, file, places)
    return config


def load_environment(source: Path, place: str) -> EnvironmentSection:
    """Reads the section [environment] alone. Raises UserError, beginning with `place`, where nothing in it
    answers.

    source: a TOML file, a recipe's name, or the folder of a run.
    """
    path = source / "config.json" if source.is_dir() else find_config(source)
    values = _read_file(path)
    _resolve_code(values, path.parent)
    table = {"environment": values.get("environment", {})}
    section = validate(_EnvironmentAlone, table, str(path)).environment
    if not section.is_used:
        remedy = "give a configuration whose [environment] has tools, factory, factories or respond"
        raise UserError(f"{place}: {path} has no environment; {remedy}")
    return section


class _EnvironmentAlone(Section):
    environment: EnvironmentSection


def _copy(source: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return copy.deepcopy(dict(source))
    except RecursionError:
        raise UserError(
            f"config: holds tables more than {MAX_DEPTH} deep in each other; flatten them"
        ) from None


def _refuse_unwritable(value: Any, file: str, places: Mapping[Keys, str], keys: Keys = ()) -> None:
    """Trackers would show a credential in config.json. The error does not repeat it."""
    if len(keys) > MAX_DEPTH:
        name = f"{'.'.join(keys[:3])}…"
        raise UserError(f"{file}: {name} holds tables more than {MAX_DEPTH} deep in each other; flatten them")
    if isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _refuse_unwritable(item, file, places, (*keys, str(key)))
    elif isinstance(value, str | Path) and holds_credential(str(value)):
        what = f"{'.'.join(keys)} holds a password or token, which the run would write down"
        remedy = "remove it, and have the code that needs it read it from the environment"
        raise UserError(f"{places.get(keys, file)}: {what}; {remedy}")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # "-sig" skips the byte-order mark of some editors
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


def _resolve(keys: Keys, text: str, folder: Path) -> str:
    """A name on the hub and an empty text stay."""
    if not text.strip():
        return text
    if keys in _PATH_KEYS:
        if (path := _find(text, folder)) is not None:
            return str(path)
        if Repository.parse(text) is not None:
            return text
    return str(Path(text).absolute())


def _find(text: str, folder: Path) -> Path | None:
    for path in (folder / text, Path(text)):
        with suppress(OSError):  # a name that no file can have is refused with the others
            if path.exists():
                return path.absolute()
    return None


def _resolve_code(values: Mapping[str, Any], folder: Path) -> None:
    names = ("task", "rewards", "tracking", "environment")
    task, rewards, tracking, environment = (_table(values, section) for section in names)
    options, factories = _table(task, "options"), _table(environment, "factories")
    lists = ((options, "tasks"), (rewards, "functions"), (tracking, "use"), (environment, "tools"))
    for table, key in lists:
        if key in table:
            table[key] = _with_paths(split_words(table[key]), folder)
    single = [(task, "name"), (environment, "factory"), (environment, "respond")]
    for table, key in (*single, *((factories, name) for name in factories)):
        if key in table:
            table[key] = _with_paths(table[key], folder)


def _table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _with_paths(named: Any, folder: Path) -> Any:
    if isinstance(named, list):
        return [_with_paths(one, folder) for one in named]
    if isinstance(named, dict):
        return {key: _with_paths(value, folder) if key == "name" else value for key, value in named.items()}
    file = file_in(named) if isinstance(named, str) else None
    return named if file is None else named.replace(file, str(_find(file, folder) or Path(file).absolute()))


def _check_paths(config: Config, file: str, places: Mapping[Keys, str]) -> None:
    """Refuses a missing path now, not after the ranks have started."""
    for section, key in _PATH_KEYS:
        path: Path | None = getattr(getattr(config, section), key)
        is_model = key != "data"
        if (
            path is None
            or Repository.parse(path) is not None
            or (path.is_dir() if is_model else path.exists())
        ):
            continue
        kind, name = ("folder", "a model") if is_model else ("file or folder", "a dataset")
        remedy = f"give one that exists, or {name}'s name on the Hugging Face hub, OWNER/NAME"
        what = f"{section}.{key} is {path}; there is no such {kind}"
        raise UserError(f"{places.get((section, key), file)}: {what}: {remedy}")


# ------------------------------------------------------------------------------------------------------------
# Overrides


@dataclass(frozen=True)
class Override:
    place: str
    """How the user wrote the key, such as --run.seed."""
    keys: Keys
    value: Any


def read_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> list[Override]:
    """Reads {"section.key": value}, or words `--section.key value`, whose text is converted to the key's
    type."""
    is_known = isinstance(overrides, Mapping | list | tuple)
    if not is_known or not all(isinstance(word, str) for word in overrides):
        remedy = "give a dict such as {'run.num_steps': 20}, or a list of words"
        raise UserError(f"overrides: is {shorten(overrides)}; {remedy}")
    if isinstance(overrides, Mapping):
        return [_read_override(f"overrides[{name!r}]", name, value) for name, value in overrides.items()]
    alone, named = read_words(overrides)
    for word in alone:
        raise UserError(f"{word}: unexpected argument; an override is written --section.key value")
    return [_read_override(f"--{name}", name, text) for name, text in named.items()]


def is_own(overrides: Sequence[str]) -> bool:
    """Whether the overrides name a model and problems, so that `tlt train` needs no configuration."""
    names = {override.keys for override in read_overrides(overrides)}
    return ("model", "path") in names and bool({("task", "data"), ("task", "name")} & names)


def _read_override(place: str, name: str, value: Any) -> Override:
    keys, dashes = tuple(name.split(".")), "--" if place.startswith("--") else ""
    if len(keys) < 2 or not all(keys):
        if meant := suggest_key(Config, name, dashes):
            raise UserError(f"{place}: unknown option; {meant}")
        remedy = "an override is written --section.key value, such as --run.seed 1"
        raise UserError(f"{place}: unknown option; {remedy}")
    other = find_elsewhere(name)
    if other is not None and (keys[0] not in Config.model_fields or other.name == name):
        raise UserError(f"{place}: unknown option; {other.describe(dashes + other.known.ours)}")
    if len(keys) > MAX_DEPTH:
        raise UserError(f"{shorten(place)}: names a key of more than {MAX_DEPTH} parts; flatten it")
    if isinstance(value, Path):
        value = str(value)
    return Override(place, keys, _parse_value(keys, value) if isinstance(value, str) else value)


def _parse_value(keys: Keys, text: str) -> Any:
    """Text is read as in TOML, or as a JSON object, unless the key takes text or a path. `none` unsets an
    optional key."""
    accepted = set(_accepted_types(keys))
    if "null" in accepted and text.lower() == "none":
        return None
    if "path" in accepted:
        return _resolve(keys, text, Path())
    if "string" in accepted and "integer" not in accepted:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        with suppress(ValueError, RecursionError):
            return json.loads(text) if text.startswith("{") else text
        return text


def _accepted_types(keys: Keys) -> Iterable[str]:
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
            what = f"{'.'.join(keys[:depth])} is a value, not a table"
            raise UserError(f"{override.place}: {what}; override it itself")
    # One source of problems replaces the other: an override is the user's latest word.
    if keys in _SOURCES_OF_PROBLEMS and override.value is not None:
        table.pop(_SOURCES_OF_PROBLEMS[keys], None)
    table[keys[-1]] = override.value

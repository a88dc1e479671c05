"""Turns a mistake that pydantic found into one line: place, value, remedy.

quickstart.toml: run.num_step is unknown; did you mean run.num_steps?
--run.seed: run.seed is 'x'; it must be a valid integer
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from tlt.base.config.elsewhere import find_elsewhere
from tlt.base.types import UserError
from tlt.base.value_types import remedy, shorten

Keys = tuple[str, ...]
Model = TypeVar("Model", bound=BaseModel)


def mistake(message: str) -> PydanticCustomError:
    """A validator's error, whose message ends the line `place: section.key is value; <message>`."""
    return PydanticCustomError("mistake", "{message}", {"message": message})


def validate(model: type[Model], values: Any, file: str, places: Mapping[Keys, str] | None = None) -> Model:
    """Raises UserError that names the first mistake.

    file: where the values come from.
    places: where single values come from instead, such as "--run.seed".
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # An unknown key goes first: it often explains another mistake, the key that is missing for it.
        first = min(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
        raise UserError(_describe(model, first, file, places or {})) from None


def find_nearest(word: str, known: Iterable[str]) -> str | None:
    ratios = {name: difflib.SequenceMatcher(None, name, word).ratio() for name in known}
    best = max(ratios, key=lambda name: ratios[name], default=None)
    return best if best is not None and ratios[best] >= 0.5 else None


def section_of(model: type[BaseModel], name: str) -> type[BaseModel]:
    # all fields of Config are sections
    section: type[BaseModel] = model.model_fields[name].annotation  # type: ignore[assignment]
    return section


def _describe(model: type[BaseModel], detail: ErrorDetails, file: str, places: Mapping[Keys, str]) -> str:
    location = tuple(map(str, detail["loc"]))
    if detail["type"] != "extra_forbidden":  # a union's branch adds its own name, such as "int", to the key's
        location = location[:2]
    key, value = ".".join(location), shorten(detail.get("input"))
    place = places.get(location, file)
    match detail["type"]:
        case "mistake" if len(location) < 2:
            return " ".join(part for part in (f"{file}:", f"{key}:" if key else "", detail["msg"]) if part)
        case "extra_forbidden":
            return f"{place}: {key} is unknown; {_suggest(model, location)}"
        case "missing" if len(location) == 1:
            return f"{place}: {key} is missing; add a section [{key}]"
        case "missing":
            return f"{place}: {key} is missing; add it to section [{location[0]}], or give --{key} VALUE"
        case "model_type" | "model_attributes_type":
            return f"{place}: {key or 'the file'} is {value}; it must be a table of keys"
    return f"{place}: {key} is {value}; {remedy(detail)}"


def _suggest(model: type[BaseModel], location: Sequence[str]) -> str:
    known, prefix = list(model.model_fields), ""
    if len(location) > 1:
        known, prefix = list(section_of(model, location[0]).model_fields), f"{location[0]}."
    nearest = find_nearest(location[-1], known)
    if meant := suggest_key(model, ".".join(location), near=f"{prefix}{nearest}" if nearest else ""):
        return meant
    if nearest:
        return f"did you mean {prefix}{nearest}?"
    return f"known {'keys' if prefix else 'sections'} are {', '.join(known)}"


def suggest_key(model: type[BaseModel], given: str, dashes: str = "", near: str = "") -> str | None:
    """dashes: what stands before a key.
    near: the key of the same section that is spelled nearly so, or empty.
    """
    other = find_elsewhere(given)
    if other is not None and other.is_whole:
        if near and near != other.known.ours and given != other.name:
            return (
                f"did you mean {dashes}{near}, or {other.trainer}'s {other.name}: {dashes}{other.known.ours}?"
            )
        return other.describe(f"{dashes}{other.known.ours}")
    key = given.rpartition(".")[2].replace("-", "_")
    having = [name for name in _sections(model) if key in section_of(model, name).model_fields]
    if same := [f"{dashes}{name}.{key}" for name in sorted(having, key=lambda name: name in _LESSER)]:
        return f"did you mean {' or '.join(same)}?"
    return None if other is None or near else other.describe(f"{dashes}{other.known.ours}")


def _sections(model: type[BaseModel]) -> list[str]:
    fields = ((name, field.annotation) for name, field in model.model_fields.items())
    return [name for name, kind in fields if isinstance(kind, type) and issubclass(kind, BaseModel)]


_LESSER = ("evaluation", "drafter", "vllm", "rewards", "tracking")
"""Sections whose keys are meant less often than the same ones of others."""

"""The options of a command: one frozen declaration, which pydantic checks, tyro explains and the command works with.

    words ── read_words ──▶ texts by name ── pydantic ──▶ Options ──▶ run(options)

Words are read here and not by tyro, so that options and overrides of the configuration have one grammar and one form of
mistake, `place: value; remedy`; tyro draws the help. Knows no command.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from tyro.conf import Positional, Suppress, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from tlt.config.arguments import read_words
from tlt.config.mistakes import Keys, find_nearest, mistake
from tlt.config.schema import Config
from tlt.config.section import Explained, split_words
from tlt.files import parse_json
from tlt.kinds import LONGEST_SHOWN, BatchSize, remedy, shorten
from tlt.types import UserError

Folder = Annotated[Path | None, arg(metavar="DIR")]
Drafter = Annotated[Path | None, arg(metavar="DRAFTER")]
Adapter = Annotated[Path | None, arg(metavar="DIR")]
"""A LoRA adapter that is merged into a command's model."""
File = Annotated[Path | None, arg(metavar="FILE")]

_POSITIONAL = get_args(Positional[int])[1]  # the marker that tyro.conf.Positional leaves on a type


def _shown_with_commas(metavar: str) -> PrimitiveConstructorSpec[tuple[Any, ...]]:
    return PrimitiveConstructorSpec[tuple[Any, ...]](
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: tuple(split_words(texts[0])),
        is_instance=lambda value: isinstance(value, tuple | list),
        str_from_instance=lambda values: [",".join(map(str, values)) or "none"],
    )


SHOWN = ConstructorRegistry()
"""How the help shows what the configuration declares, which knows no help: its lists as they are written."""


@SHOWN.primitive_rule
def _show_list(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[Any, ...]] | None:
    return _shown_with_commas("LIST") if info.type_origin in (tuple, list) else None


def _read_json(value: str, what: str, example: str) -> Any:
    try:
        return parse_json(value)
    except ValueError as error:
        reason = getattr(error, "msg", error)
        raise mistake(f"it is no JSON {what} ({reason}): write one such as '{example}'") from None


def _read_object(value: Any) -> Any:
    example = '{"key": 1}'
    found = _read_json(value, "object", example) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise mistake(f"it is no JSON object: write one such as '{example}'")
    return found


_SHOWN_AS_OBJECT = PrimitiveConstructorSpec[dict[str, Any]](
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda texts: dict(_read_object(texts[0])),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)
JsonObject = Annotated[dict[str, Any], BeforeValidator(_read_object), _SHOWN_AS_OBJECT]
JsonTexts = Annotated[dict[str, str], BeforeValidator(_read_object), _SHOWN_AS_OBJECT]


def _read_texts(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith("["):
        return (value,) if isinstance(value, str) else value
    return _read_json(value, "list", r'["\n\n", "###"]')


_SHOWN_AS_TEXTS = PrimitiveConstructorSpec[tuple[str, ...]](
    nargs=1,
    metavar="TEXT",
    instance_from_str=lambda texts: tuple(_read_texts(texts[0])),
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=lambda value: [json.dumps(value)],
)
StopTexts = Annotated[tuple[str, ...], BeforeValidator(_read_texts), _SHOWN_AS_TEXTS]

_SHOWN_ALONE = PrimitiveConstructorSpec[bool](
    nargs=0,
    metavar="",
    instance_from_str=lambda texts: True,
    is_instance=lambda value: isinstance(value, bool),
    str_from_instance=lambda value: [str(value).lower()],
)
Switch = Annotated[bool, _SHOWN_ALONE]
"""An option that is written without a value, and means true."""

_LISTED = Field(min_length=1), BeforeValidator(split_words)
Names = Annotated[tuple[str, ...], *_LISTED, _shown_with_commas("NAME,...")]
Numbers = Annotated[tuple[BatchSize, ...], *_LISTED, _shown_with_commas("N,...")]


class Options(Explained):
    """The base of all commands' options: no unknown names, no later changes. Texts become what a field wants."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class WithOverrides(Options):
    """Options of a command that also takes `--section.key value` for every key of the configuration."""

    overrides: Suppress[tuple[str, ...]] = ()


Given = TypeVar("Given", bound=Options)


def parse_options(command: str, kind: type[Given], arguments: Sequence[str]) -> Given:
    """Returns the options of `tlt COMMAND ARGUMENTS`. Raises UserError that names the first mistake."""
    switches = [name.replace("_", "-") for name, field in kind.model_fields.items() if _SHOWN_ALONE in field.metadata]
    words = read_words(arguments, switches)
    places = dict(_fields(kind))
    positional = [name for name, field in kind.model_fields.items() if _POSITIONAL in field.metadata]
    values: dict[str, Any] = {}
    for name, word in zip(positional, words.alone, strict=False):
        values[name] = word
    for word in words.alone[len(positional) :]:
        raise UserError(f"{word}: unexpected argument; see tlt {command} --help")
    overrides: list[str] = []
    for given, text in words.named.items():
        name = given.replace("-", "_")
        if "." in given and issubclass(kind, WithOverrides):
            overrides += [f"--{given}={text}"]
        elif name in positional:
            raise UserError(f"--{given}: is written without its name; see tlt {command} --help")
        elif name not in places:
            raise UserError(f"--{given}: unknown option; {_suggest(command, kind, given)}")
        else:
            _assign(values, kind, places[name], text)
    if overrides:
        values["overrides"] = tuple(overrides)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(_describe(command, kind, error)) from None


def _fields(kind: type[Options]) -> Iterator[tuple[str, Keys]]:
    """Yields every option's name with where it lies, in a group or not."""
    for name, field in kind.model_fields.items():
        if isinstance(field.default, Options):
            yield from ((inner, (name, inner)) for inner in type(field.default).model_fields)
        elif name != "overrides":
            yield name, (name,)


def _assign(values: dict[str, Any], kind: type[Options], keys: Keys, text: str) -> None:
    field = kind.model_fields[keys[0]]
    if isinstance(field.default, Options):
        values = values.setdefault(keys[0], field.default.model_dump(exclude_unset=True))  # this command's own defaults
        field = type(field.default).model_fields[keys[1]]
    can_be_none = type(None) in get_args(field.annotation)
    values[keys[-1]] = None if can_be_none and text.lower() == "none" else text


def _suggest(command: str, kind: type[Options], given: str) -> str:
    known = [name.replace("_", "-") for name, _ in _fields(kind)]
    if issubclass(kind, WithOverrides):
        sections = Config.model_fields.items()
        known += [f"{name}.{key}" for name, section in sections for key in getattr(section.annotation, "model_fields", ())]
    nearest = find_nearest(given, known)
    return f"did you mean --{nearest}?" if nearest else f"see tlt {command} --help"


def _describe(command: str, kind: type[Options], error: ValidationError) -> str:
    details = error.errors(include_url=False)
    if missing := [_label(kind, detail["loc"]) for detail in details if detail["type"] == "missing"]:
        return f"{command}: needs {', '.join(missing)}; see tlt {command} --help"
    detail = details[0]
    if detail["type"] == "mistake" and detail["loc"] not in {keys for _, keys in _fields(kind)}:
        return detail["msg"]  # it is of several options, and names them itself
    if detail["type"] == "too_short":
        return f"{_label(kind, detail['loc'])}: is empty; give at least one"
    value = detail["input"]
    is_plain = isinstance(value, str) and value.strip() and value.isprintable() and len(value) <= LONGEST_SHOWN
    shown = value if is_plain else shorten(value)
    return f"{_label(kind, detail['loc'])}: is {shown}; {remedy(detail)}"


def _label(kind: type[Options], location: tuple[int | str, ...]) -> str:
    """Returns how a user writes the field at this place: `MODEL` or `--max-tokens`."""
    field = kind.model_fields[str(location[0])]
    if _POSITIONAL in field.metadata:
        return next(str(hint.metavar) for hint in field.metadata if getattr(hint, "metavar", None))
    name = location[1] if isinstance(field.default, Options) else location[0]
    return f"--{str(name).replace('_', '-')}"

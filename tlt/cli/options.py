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
from tyro.constructors import PrimitiveConstructorSpec

from tlt.config.arguments import read_words
from tlt.config.mistakes import Keys, find_nearest, mistake
from tlt.config.schema import Config
from tlt.config.section import Explained, split_words
from tlt.kinds import BatchSize, remedy
from tlt.types import UserError

Folder = Annotated[Path | None, arg(metavar="DIR")]
Drafter = Annotated[Path | None, arg(metavar="DRAFTER")]
File = Annotated[Path | None, arg(metavar="FILE")]

_POSITIONAL = get_args(Positional[int])[1]  # the marker that tyro.conf.Positional leaves on a type


def _listed(metavar: str) -> tuple[BeforeValidator, PrimitiveConstructorSpec[tuple[Any, ...]]]:
    """Returns how a list is read, and how the help shows it: with commas."""
    shown = PrimitiveConstructorSpec[tuple[Any, ...]](
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: tuple(split_words(texts[0])),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda values: [",".join(map(str, values))],
    )
    return BeforeValidator(split_words), shown


def json_object(option: str) -> tuple[BeforeValidator, PrimitiveConstructorSpec[dict[str, Any]]]:
    """Returns how an option that is a JSON object is read, and how the help shows it."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise mistake(f"{option}: {value!r} is no JSON ({error.msg}); write an object") from None
        if not isinstance(value, dict):
            raise mistake(f"{option}: '{json.dumps(value)}' is no JSON object; write one such as '{{\"key\": 1}}'")
        return value

    shown = PrimitiveConstructorSpec[dict[str, Any]](
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda texts: dict(read(texts[0])),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    )
    return BeforeValidator(read), shown


def _read_texts(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith("["):
        return (value,) if isinstance(value, str) else value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise mistake(f'--stop: {value!r} is no JSON list ({error.msg}); write one such as \'["\\n\\n", "###"]\'') from None


_SHOWN_AS_TEXTS = PrimitiveConstructorSpec[tuple[str, ...]](
    nargs=1,
    metavar="TEXT",
    instance_from_str=lambda texts: tuple(_read_texts(texts[0])),
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=lambda value: [json.dumps(value)],
)
StopTexts = Annotated[tuple[str, ...], BeforeValidator(_read_texts), _SHOWN_AS_TEXTS]

_WORDS, _NUMBERS = _listed("NAME,..."), _listed("N,...")
Names = Annotated[tuple[str, ...], Field(min_length=1), *_WORDS]
Numbers = Annotated[tuple[BatchSize, ...], Field(min_length=1), *_NUMBERS]


class Options(Explained):
    """The base of all commands' options: no unknown names, no later changes. Texts become what a field wants."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class WithOverrides(Options):
    """Options of a command that also takes `--section.key value` for every key of the configuration."""

    overrides: Suppress[tuple[str, ...]] = ()


Given = TypeVar("Given", bound=Options)


def parse_options(command: str, kind: type[Given], arguments: Sequence[str]) -> Given:
    """Returns the options of `tlt COMMAND ARGUMENTS`. Raises UserError that names the first mistake."""
    words = read_words(arguments)
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
    if detail["type"] == "mistake":  # a validator of ours names the options itself
        return detail["msg"]
    if detail["type"] == "too_short":
        return f"{_label(kind, detail['loc'])}: is empty; give at least one"
    value = detail["input"]
    shown = value if isinstance(value, str) and value else repr(value)
    return f"{_label(kind, detail['loc'])}: is {shown}; {remedy(detail)}"


def _label(kind: type[Options], location: tuple[int | str, ...]) -> str:
    """Returns how a user writes the field at this place: `MODEL` or `--max-tokens`."""
    field = kind.model_fields[str(location[0])]
    if _POSITIONAL in field.metadata:
        return next(str(hint.metavar) for hint in field.metadata if getattr(hint, "metavar", None))
    name = location[1] if isinstance(field.default, Options) else location[0]
    return f"--{str(name).replace('_', '-')}"

"""A command's options: a frozen class whose fields pydantic checks and the help explains.

words ── read_words ──▶ texts by name ── pydantic ──▶ Options ──▶ run(options)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from tlt.base.config.arguments import read_words
from tlt.base.config.elsewhere import find_elsewhere
from tlt.base.config.mistakes import find_nearest, mistake, section_of, suggest_key
from tlt.base.config.schema import Config
from tlt.base.config.section import Explained, split_words
from tlt.base.io.files import parse_json
from tlt.base.types import UserError
from tlt.base.value_types import LONGEST_SHOWN, StopIds, remedy, shorten


@dataclass(frozen=True)
class Written:
    metavar: str
    """The value's name in the help; empty: a switch."""
    is_alone: bool = False
    """Whether the value stands without the option's name."""
    is_many: bool = False
    """Whether it takes all following values without a name."""

    @staticmethod
    def of(field: FieldInfo) -> Written | None:
        return next((hint for hint in reversed(field.metadata) if isinstance(hint, Written)), None)


SPECULATION = "off|adaptive|[DRAFTER:]DEPTHxWIDTHxBUDGET"
Folder = Annotated[Path | None, Written("DIR")]
DrafterName = Annotated[Path | None, Written("DRAFTER")]
AdapterName = Annotated[Path | None, Written("DIR")]
File = Annotated[Path | None, Written("FILE")]
ModelName = Annotated[Path, Written("MODEL", is_alone=True)]
ConfigFile = Annotated[Path, Written("CONFIG", is_alone=True)]
Switch = Annotated[bool, Written("")]


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


def _read_texts(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith("["):
        return (value,) if isinstance(value, str) else value
    return _read_json(value, "list", r'["\n\n", "###"]')


JsonObject = Annotated[dict[str, Any], BeforeValidator(_read_object)]
JsonTexts = Annotated[dict[str, str], BeforeValidator(_read_object)]
StopWords = Annotated[tuple[str, ...], BeforeValidator(_read_texts), Written("TEXT")]

LISTED = Field(min_length=1), BeforeValidator(split_words)
StopNumbers = Annotated[StopIds, Field(strict=False), BeforeValidator(split_words), Written("ID,...")]
Names = Annotated[tuple[str, ...], *LISTED, Written("NAME,...")]


class Options(Explained):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, defer_build=True
    )


class WithOverrides(Options):
    """Also takes `--section.key value`."""

    overrides: tuple[str, ...] = ()


class WithRest(Options):
    """Hands the words after `--` on to another program."""

    rest: tuple[str, ...] = ()


Given = TypeVar("Given", bound=Options)


def options_of(kind: type[Options]) -> dict[str, FieldInfo]:
    return {name: field for name, field in kind.model_fields.items() if name not in ("overrides", "rest")}


def split_rest(words: Sequence[str]) -> tuple[list[str], tuple[str, ...] | None]:
    """Returns the words before and after `--`; None: there is no `--`."""
    at = list(words).index("--") if "--" in words else None
    return list(words[:at]), None if at is None else tuple(words[at + 1 :])


def with_dashes(name: str) -> str:
    return name.replace("_", "-")


def parse_options(command: str, kind: type[Given], arguments: Sequence[str]) -> Given:
    """Raises UserError that names the first mistake."""
    known = options_of(kind)
    written = {name: hint for name, field in known.items() if (hint := Written.of(field)) is not None}
    arguments, rest = split_rest(arguments)
    if rest is not None and not issubclass(kind, WithRest):
        raise UserError(f"--: tlt {command} starts no other program; leave it out")
    switches = [with_dashes(name) for name, hint in written.items() if not hint.metavar]
    words_alone, named = read_words(arguments, switches)
    alone = [name for name, hint in written.items() if hint.is_alone]
    values: dict[str, Any] = dict(zip(alone, words_alone, strict=False))
    left_over = words_alone[len(alone) :]
    if values and written[last := [*values][-1]].is_many:
        values[last], left_over = (values[last], *left_over), []
    for word in left_over:
        raise UserError(f"{word}: unexpected argument; see tlt {command} --help")
    overrides: list[str] = []
    for given, text in named.items():
        name = given.replace("-", "_")
        if "." in given and issubclass(kind, WithOverrides):
            overrides += [f"--{given}={text}"]
        elif name in alone:
            raise UserError(f"--{given}: is written without its name; see tlt {command} --help")
        elif name not in known:
            raise UserError(f"--{given}: unknown option; {_suggest(command, kind, given)}")
        else:
            can_be_none = type(None) in get_args(known[name].annotation)
            values[name] = None if can_be_none and text.lower() == "none" else text
    if overrides:
        values["overrides"] = tuple(overrides)
    if rest:
        values["rest"] = rest
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(_describe(command, kind, error)) from None


def _suggest(command: str, kind: type[Options], given: str) -> str:
    known = list(map(with_dashes, own := options_of(kind)))
    other, has_keys = find_elsewhere(given), issubclass(kind, WithOverrides)
    if given.rpartition(".")[2].replace("-", "_") in own:
        return f"did you mean --{with_dashes(given.rpartition('.')[2])}?"
    if has_keys and (meant := suggest_key(Config, given, "--")):
        return meant
    if not has_keys and other is not None:
        ours = other.known.ours.rpartition(".")[2]
        if same := next((name for name in own if f"{ours}_".startswith(f"{name}_")), None):
            return other.describe(f"--{with_dashes(same)}")
    if has_keys:
        for name in Config.model_fields:
            known += [f"{name}.{key}" for key in section_of(Config, name).model_fields]
    nearest = find_nearest(given, known)
    return f"did you mean --{nearest}?" if nearest else f"see tlt {command} --help"


def _describe(command: str, kind: type[Options], error: ValidationError) -> str:
    details = error.errors(include_url=False)
    missing = {str(detail["loc"][0]) for detail in details if detail["type"] == "missing"}
    if missing:
        labels = [label(name, field) for name, field in kind.model_fields.items() if name in missing]
        return f"{command}: needs {', '.join(labels)}; see tlt {command} --help"
    detail = details[0]
    if not detail["loc"]:
        return detail["msg"]  # a validator of several options names them in its message
    name = str(detail["loc"][0])
    place = label(name, kind.model_fields[name])
    if detail["type"] == "too_short":
        return f"{place}: is empty; give at least one"
    value = detail["input"]
    is_plain = isinstance(value, str) and value.strip() and value.isprintable()
    shown = value if is_plain and len(value) <= LONGEST_SHOWN else shorten(value)
    return f"{place}: is {shown}; {remedy(detail)}"


def label(name: str, field: FieldInfo) -> str:
    """`MODEL` or `--max-tokens`, as a user writes it."""
    hint = Written.of(field)
    return hint.metavar if hint is not None and hint.is_alone else f"--{with_dashes(name)}"

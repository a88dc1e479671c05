"""The help of a command."""

from __future__ import annotations

import inspect
import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tlt.apps.cli.options import SPECULATION, Options, WithOverrides, WithRest, Written, label, options_of
from tlt.apps.cli.summary import JSON_HELP
from tlt.base.config.mistakes import section_of
from tlt.base.config.schema import Config
from tlt.base.config.vllm import VllmSection
from tlt.base.speculation import Speculation

OWN = "Options:"
_METAVARS = {
    int: "INT",
    float: "FLOAT",
    str: "TEXT",
    bool: "{true,false}",
    tuple: "LIST",
    list: "LIST",
    dict: "JSON",
}


def explain(command: str, kind: type[Options], lists_keys: bool = False, has_record: bool = False) -> str:
    width = shutil.get_terminal_size().columns

    def paragraph(text: str, indent: str = "") -> str:
        return textwrap.indent(textwrap.fill(text, width - len(indent), break_on_hyphens=False), indent)

    lines = [paragraph(usage(command, kind))]
    lines += [f"\n{paragraph(text)}" for text in inspect.cleandoc(kind.__doc__ or "").split("\n\n")]
    for title, entries in option_groups(kind, lists_keys, has_record):
        lines += ["", paragraph(title)]
        for heading, text in entries.items():
            lines += [paragraph(heading, "  "), paragraph(text, "      ")]
    return "\n".join(lines)


def usage(command: str, kind: type[Options]) -> str:
    headings = {_heading(label(name, field), field): field for name, field in options_of(kind).items()}
    usual = [text for text, field in headings.items() if field.is_required() or not text.startswith("--")]
    rest = ["[-- ...]"] if issubclass(kind, WithRest) else []
    return " ".join(["usage: tlt", command, *usual, "[--option VALUE ...]", *rest])


def option_groups(
    kind: type[Options], lists_keys: bool = False, has_record: bool = False
) -> Iterator[tuple[str, dict[str, str]]]:
    for title, fields in _groups(kind, lists_keys):
        entries = {_heading(name, field): _explained(field) for name, field in fields.items()}
        yield (
            title,
            entries | ({"--json": f"{JSON_HELP} (default: false)"} if title == OWN and has_record else {}),
        )


def _groups(kind: type[Options], lists_keys: bool) -> Iterator[tuple[str, Mapping[str, FieldInfo]]]:
    known = options_of(kind)
    empty = Options, WithOverrides, WithRest
    bases = [base for base in kind.__bases__ if issubclass(base, Options) and base not in empty]
    inherited = {name for base in bases for name in base.model_fields}
    yield OWN, {label(name, field): field for name, field in known.items() if name not in inherited}
    rare = VllmSection.model_fields
    for base in bases:
        names = [name for name in base.model_fields if name not in rare]
        yield _purpose(base), {label(name, known[name]): known[name] for name in names}
    if rare.keys() <= known.keys():
        yield "With --engine vllm:", {label(name, known[name]): known[name] for name in rare}
    sections = sorted(Config.model_fields, key=lambda name: name == "vllm")
    for name in sections if lists_keys else ():
        section = section_of(Config, name)
        keys = {f"--{name}.{key}": field for key, field in section.model_fields.items()}
        yield f"[{name}] {_purpose(section)}", keys


def _purpose(declaration: type[BaseModel]) -> str:
    return " ".join((declaration.__doc__ or "").split())


def _heading(written: str, field: FieldInfo) -> str:
    hint = Written.of(field)
    if hint is None:
        return f"{written} {_metavar(field.annotation)}"
    return written if hint.is_alone else f"{written} {hint.metavar}".rstrip()


def _metavar(kind: Any) -> str:
    """{a,b} for a choice, LIST for comma-separated words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _metavar(arguments[0])
    if origin is Literal:
        words = ",".join(map(str, arguments))
        return f"{{{words}}}" if len(arguments) > 1 else words
    if kind == Speculation:
        return SPECULATION
    if (origin or kind) in _METAVARS:
        return _METAVARS[origin or kind]
    branches = [_metavar(branch) for branch in arguments if branch is not NoneType]
    return "|".join(branches) or kind.__name__.upper()


def _explained(field: FieldInfo) -> str:
    text = (field.description or "").replace("None:", "none:")
    if field.is_required():
        return f"{text} (required)"
    value = field.get_default(call_default_factory=True)
    hint = Written.of(field)
    is_switch = hint is not None and not hint.metavar
    if is_switch or (value is None and "none:" not in text) or (value in ((), {}, []) and "default:" in text):
        return text
    if isinstance(value, tuple | list):
        value = ",".join(map(str, value))
    shown = json.dumps(value) if isinstance(value, bool | dict) else value
    return f"{text} (default: {'none' if shown in (None, '') else shown})"

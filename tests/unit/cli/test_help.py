"""The texts of --help: every option and every key of the configuration has one of its own, in whole sentences."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from tlt.cli.commands import COMMANDS
from tlt.cli.options import Options
from tlt.config.schema import Config, Section


def declarations() -> Iterator[type[BaseModel]]:
    """Yields the classes that declare options and keys."""
    yield from (section.annotation for section in Config.model_fields.values() if isinstance(section.annotation, type))
    for command in COMMANDS.values():
        yield command.options
        yield from (
            type(field.default) for field in command.options.model_fields.values() if isinstance(field.default, Options)
        )


def texts(declaration: type[BaseModel]) -> dict[str, str]:
    """The text below each of the class's own fields; empty where there is none."""
    (body,) = (
        node.body for node in ast.parse(textwrap.dedent(inspect.getsource(declaration))).body if isinstance(node, ast.ClassDef)
    )
    found = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            found[node.target.id] = inspect.cleandoc(str(following.value.value)) if is_text else ""
    return found


@pytest.mark.parametrize("declaration", sorted(set(declarations()), key=lambda kind: kind.__name__))
def test_every_option_has_a_text_that_the_help_does_not_break_in_the_middle_of_a_sentence(declaration: type[BaseModel]) -> None:
    """tyro begins a new line where the source does."""
    assert issubclass(declaration, Options | Section)
    found = texts(declaration)
    assert [name for name, text in found.items() if not text] == []
    for name, text in found.items():
        *inner, last = text.splitlines()
        assert [line for line in inner if not line.endswith(".")] == [], name
        assert last.endswith(".")

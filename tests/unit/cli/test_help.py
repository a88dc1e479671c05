"""The texts of --help: every option and every key of the configuration has one of its own, in whole sentences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from tlt.cli.commands import COMMANDS
from tlt.cli.options import Options
from tlt.config.schema import Config
from tlt.config.section import Section


def declarations() -> Iterator[type[BaseModel]]:
    """Yields the classes that declare options and keys."""
    yield from (section.annotation for section in Config.model_fields.values() if isinstance(section.annotation, type))
    for command in COMMANDS.values():
        yield command.options
        yield from (
            type(field.default) for field in command.options.model_fields.values() if isinstance(field.default, Options)
        )


@pytest.mark.parametrize("declaration", sorted(set(declarations()), key=lambda kind: kind.__name__))
def test_every_option_is_explained_in_whole_sentences_and_one_paragraph(declaration: type[BaseModel]) -> None:
    assert issubclass(declaration, Options | Section)
    texts = {name: field.description or "" for name, field in declaration.model_fields.items() if name != "overrides"}
    assert [name for name, text in texts.items() if not text.endswith(".") or "\n" in text] == []

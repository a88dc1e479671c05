"""The texts of --help: every option and every key of the configuration has one of its own, in whole
sentences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from tlt.apps.cli.commands import COMMANDS
from tlt.apps.cli.main import main
from tlt.apps.cli.options import Options
from tlt.base.config.schema import Config
from tlt.base.config.section import Section


def declarations() -> Iterator[type[BaseModel]]:
    """Yields the classes that declare options and keys."""
    yield from (
        section.annotation for section in Config.model_fields.values() if isinstance(section.annotation, type)
    )
    for command in COMMANDS.values():
        yield command.options


@pytest.mark.parametrize("declaration", sorted(set(declarations()), key=lambda kind: kind.__name__))
def test_every_option_is_explained_in_whole_sentences_and_one_paragraph(declaration: type[BaseModel]) -> None:
    assert issubclass(declaration, Options | Section)
    texts = {
        name: field.description or ""
        for name, field in declaration.model_fields.items()
        if name not in ("overrides", "rest")
    }
    assert [name for name, text in texts.items() if not text.endswith(".") or "\n" in text] == []


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *command: str) -> str:
    """The help on one line."""
    monkeypatch.setenv("COLUMNS", "4000")
    assert main([*command, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())

"""The texts of --help: every option and every key of the configuration has one of its own, in whole
sentences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from tlt.apps.cli.commands import COMMANDS
from tlt.apps.cli.main import main
from tlt.apps.cli.options import Options
from tlt.base.config.load import load_config
from tlt.base.config.lora import ALL_TARGETS
from tlt.base.config.schema import Config
from tlt.base.config.section import Section
from tlt.base.config.vllm import VllmSection
from tlt.base.io.recipes import find_recipe


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


def test_lists_are_shown_as_they_are_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, monkeypatch, "train")
    for option in ("lora.targets", "tracking.use", "rewards.functions", "rewards.weights", "sampling.stop"):
        assert f"--{option} LIST " in text
    assert f"(default: {','.join(ALL_TARGETS)})" in text
    read = load_config(
        find_recipe("countdown"), ["--lora.rank", "2", "--lora.targets", ",".join(ALL_TARGETS)]
    )
    assert read.lora.targets == ALL_TARGETS


def test_an_option_says_what_it_is_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, monkeypatch, "generate")
    assert "training response" not in text


@pytest.mark.parametrize("command", ["generate", "audit engine"])
def test_options_of_vllm_stand_apart_at_the_end(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common, own = shown(capsys, monkeypatch, *command.split()).split(" With --engine vllm: ")
    for name in VllmSection.model_fields:
        option = f" --{name.replace('_', '-')} "
        assert option not in common
        assert option in f" {own}"


def test_a_default_is_shown_as_it_is_typed_and_only_where_it_says_something(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, monkeypatch, "train")
    assert "None" not in text
    assert "none: no limit. (default: none)" in text
    assert "--run.num_ranks INT|auto " in text
    assert "--resume DIR|auto Continues" in text
    assert "else begins it. [run]" in text, "no default without a meaning"
    assert text.index("[vllm]") > text.index("[tracking]"), "rare keys come last"
    assert "uploads nothing and needs no network. --json" in shown(capsys, monkeypatch, "hub", "push")


def test_the_overview_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80

"""The reference pages say everything that the code declares."""

from __future__ import annotations

import dataclasses

import pytest

import tlt
from tests.unit.training.report.records import record
from tlt.apps.cli.commands import COMMANDS
from tlt.apps.cli.options import label, options_of
from tlt.base.config.mistakes import section_of
from tlt.base.config.schema import Config
from tlt.base.records import TurnsRecord
from tlt.training.saved.evaluations import Evaluation
from tools.docs_reference import PAGES


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {address.removeprefix("reference/"): make() for address, make in PAGES.items()}


def test_every_key_of_the_configuration_has_a_heading(pages: dict[str, str]) -> None:
    keys = [f"{name}.{key}" for name in Config.model_fields for key in section_of(Config, name).model_fields]
    assert len(keys) > 100
    assert [key for key in keys if f"### `{key}`\n" not in pages["configuration.md"]] == []


def test_every_option_of_every_command_is_explained(pages: dict[str, str]) -> None:
    for name, command in COMMANDS.items():
        _, _, section = pages["commands.md"].partition(f"## tlt {name}\n")
        section = section.partition("\n## ")[0]
        for option, field in options_of(command.options).items():
            assert f"`{label(option, field)}" in section, (name, option)


def test_every_public_name_is_described(pages: dict[str, str]) -> None:
    names = set(tlt.__all__) - {"__version__"}
    assert {name for name in names if f"## tlt.{name}\n" not in pages["python.md"]} == set()


def test_every_figure_that_a_run_writes_has_a_meaning(pages: dict[str, str]) -> None:
    rows = dict(line.split(" | ", 1) for line in pages["metrics.md"].splitlines() if line.startswith("| `"))
    meanings = {name.strip("|` "): text.strip("| ") for name, text in rows.items()}
    figures: list[str] = []
    for name, value in dataclasses.asdict(record(3)).items():
        parts = value if isinstance(value, dict) else None
        figures += [name] if parts is None else [f"{name}.{field}" for field in parts]
    figures += [f"rollout.response_tokens.{name}" for name in ("mean", "p50", "p95", "max")]
    figures += [f"rollout.turns.{field.name}" for field in dataclasses.fields(TurnsRecord)]
    figures += [field.name for field in dataclasses.fields(Evaluation)]
    assert [figure for figure in figures if not meanings.get(figure)] == []

"""The end of a command: a summary on a terminal, JSON elsewhere."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from tests.unit.apps.cli.parts import succeed
from tlt.apps.cli import main as cli
from tlt.apps.cli.commands import COMMANDS
from tlt.apps.cli.summary import Summary, show, written
from tlt.base.io.streams import Guarded
from tlt.drafter.training.offline import OfflineSummary

TASK = ("task", "countdown", "--num", "3", "--out", "problems.jsonl")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stdout is a terminal of 80 columns."""
    monkeypatch.setattr(Guarded, "isatty", lambda _: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")


@pytest.mark.usefixtures("here", "terminal")
def test_on_a_terminal_the_headline_comes_first_and_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(TASK) == 0
    _, headline, *rows = capsys.readouterr().out.splitlines()
    assert headline == "3 problems of countdown written to problems.jsonl"
    assert [row.split() for row in rows] == [["split", "train"], ["seed", "0"]]


@pytest.mark.usefixtures("here", "terminal")
def test_with_json_it_stands_alone_on_stdout_even_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TASK, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == 3
    assert cli.main(["plan", "memory", "countdown", "--json"]) == 0
    said = capsys.readouterr()
    assert "fits" in json.loads(said.out)
    assert "memory of a rank in GiB" in said.err


@pytest.mark.usefixtures("here")
def test_in_a_pipe_json_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert succeed(capsys, *TASK)["problems"] == 3


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.summarize])
def test_the_help_of_every_command_with_a_record_tells_of_json(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*name.split(), "--help"]) == 0
    assert capsys.readouterr().out.count("\n  --json\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("seconds", 0.012345, "0.0123 s"),
        ("idle_seconds", 561.2, "9 min 21 s"),
        ("truncated_share", 0.0625, "6.25%"),
        ("solve_rate", 1.0, "100%"),
        ("tokens_per_second", 12345.6, "12,346 tokens/s"),
        ("tokens", 1234567, "1,234,567"),
        ("peak_gib", 15.625, "15.6 GiB"),
        ("file_bytes", 12_345_678, "12.3 MB"),
        ("loss", 0.000012345, "1.23e-05"),
        ("loss", float("nan"), "–"),
        ("loss", None, "–"),
        ("fits", True, "yes"),
        ("by_depth_share", [0.5, 0.25], "50%  25%"),
        ("names", (), "none"),
    ],
)
def test_values_are_rounded_and_wear_the_unit_of_their_name(name: str, value: object, text: str) -> None:
    assert written(name, value) == text


RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "audit engine": ({"lossless": None, "modes": {"off": {"lossless": True}}, "device": "cpu"}, "undecided"),
    "bench": (
        {
            "speedup": {"mean": 1.5, "low": 1.4, "high": 1.6},
            "tokens_per_second": {"off": 100.0, "adaptive": 150.0},
            "accept_length": 2.5,
            "responses": 8,
            "num_different": 0,
            "batch_size": 8,
            "strategy_seconds": {"4x1x4": 1.0},
            "device": "cpu",
        },
        "speculation: 1.50 (1.40 to 1.60) times as fast as without",
    ),
    "drafter export": (
        {"format": "vllm-eagle", "engine": "vLLM", "draft_vocab": 24, "out": "served"},
        "drafter for vLLM written to served",
    ),
    "drafter train": (
        {"responses": 8, "device": "cpu", "out": "d"}
        | asdict(OfflineSummary(1000, 2, 3.5, 3.4, 0.25, 0.613, "it is weak", 24, 1.0)),
        "drafter written to d, accepted with probability 61.3%",
    ),
    "plan memory": ({"verdict": "fits: 2.5 GiB"}, "fits: 2.5 GiB"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_becomes_a_headline_and_rows_that_can_be_drawn(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    record, headline = RECORDS[name]
    summarize = COMMANDS[name].summarize
    assert summarize is not None
    show(record, summarize, as_json=False)
    assert capsys.readouterr().out.splitlines()[1].removeprefix("\x1b[1m").removesuffix("\x1b[0m") == headline


ESCAPES = "\x1b[2J\x9b31m\u202e\u200b\x07"


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("as_json", [False, True])
def test_no_text_of_a_record_controls_the_terminal(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    """In the headline, a label, a value, a list, a table's heads and cells, and its name."""
    table = [{f"head{ESCAPES}": f"cell{ESCAPES}", "other": [ESCAPES]}]
    rows = {f"label{ESCAPES}": f"value{ESCAPES}", "list": [ESCAPES], "in": {ESCAPES: ESCAPES}}
    record = rows | {f"table{ESCAPES}": table}
    show(record, lambda found: Summary(f"headline{ESCAPES}", found), as_json)
    said = capsys.readouterr().out
    assert [c for c in said if c in ESCAPES and c not in "[2J31m"] == []
    if as_json:
        assert json.loads(said) == record

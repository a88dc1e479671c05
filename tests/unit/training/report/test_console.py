"""The console and the summary of a run."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rich.console
from rich.cells import cell_len

from tests.unit.training.report.records import record
from tlt.base.records import LengthStats
from tlt.training.report.console import WIDTH, Console
from tlt.training.report.outcome import Gain, Outcome, summary_rows


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, environ: dict[str, str], **options: object) -> str:
    with Console(num_steps=3, stream=stream, environ=environ, **options) as console:
        with console.status("evaluating on 256 held-out problems"):
            console.evaluation(0, 0.402, 21.0)
        for step in (1, 2, 3):
            extreme = {
                "response_tokens": LengthStats(1e4, 13141.0, 3e4, 131072),
                "tokens_per_second": 123456.7,
                "accept_length": math.nan,
            }
            console.step(record(step, rollout=extreme if step == 2 else {}))
        console.evaluation(3, 0.483, 21.0, is_best=True)
        products = {
            "policy": Path("/somewhere/far") / ("long-" * 30),
            "metrics.jsonl": Path.cwd() / "runs" / "metrics.jsonl",
        }
        outcome = Outcome(Gain((0, 3), (0.402, 0.483), (0.402, 0.483), 3e-5), [], 3, 561.0)
        console.summary([*summary_rows(outcome, products)], ["tlt generate runs/policy"])
    return stream.getvalue()


def rows_of(outcome: Outcome) -> dict[str, str]:
    """Values by name; lines without a name go on with the one before."""
    rows: dict[str, str] = {}
    for name, value in summary_rows(outcome, {}):
        rows[name or [*rows][-1]] = f"{rows.get(name or [*rows][-1], '')} {value.plain}".strip()
    return rows


def test_a_summary_says_reward_and_solve_rate_where_functions_alone_score_and_what_was_left_out() -> None:
    gain = Gain((0, 8), (0.008, 0.0), (0.585, 0.642), 0.013, by_reward=True)
    rows = rows_of(
        Outcome(
            gain, ["the evaluation after 9 updates is left out: 2 of its responses have no score"], 9, 60.0
        )
    )
    assert (
        rows["reward"]
        == "0.585 → 0.642 on held-out problems, before → after paired sign-flip test, one-sided: p = 0.013"
    )
    assert rows["solved"].startswith("0.8% → 0.0% the evaluation after 9 updates is left out: 2 of its")
    beside = rows_of(Outcome(replace(gain, by_reward=False), [], 9, 60.0))
    assert beside["solved"].startswith("0.8% → 0.0% of held-out problems, before → after")
    assert beside["reward"] == "0.585 → 0.642", "it stands beside what is judged"
    later = rows_of(Outcome(Gain((4, 8), (0.5, 0.75), (0.5, 0.75), 0.25), [], 9, 60.0))
    assert later["solved"].startswith("50.0% → 75.0% of held-out problems, after 4 → 8 updates")


def drawn(console: Console) -> str:
    """The live line, as plain text."""
    paper = io.StringIO()
    rich.console.Console(file=paper, width=WIDTH).print(console._live.get_renderable())
    return paper.getvalue()


def printed(*calls: Callable[[Console], None]) -> list[str]:
    """The lines of a console off a terminal."""
    stream = io.StringIO()
    with Console(stream=stream, environ={}) as console:
        for call in calls:
            call(console)
    return stream.getvalue().splitlines()


def test_a_measured_speedup_is_said_below_its_step_and_nothing_where_none_was_measured() -> None:
    pair = {"speedup": 2.125, "num_responses": 5, "num_tokens": 1280, "seconds": 0.75, "num_different": 0}
    differing, none = {**pair, "num_different": 1}, {"num_tokens": 0}
    lines = printed(
        *(
            lambda console, step=step, pair=pair: console.step(record(step, speedup=pair))
            for step, pair in enumerate((pair, differing, none), 1)
        )
    )
    assert [line.strip() for line in lines if "speedup " in line] == [
        "step 1: speedup 2.12, measured on 5 responses (1,280 tokens) in 0.8 s",
        "step 2: speedup 2.12, measured on 5 responses (1,280 tokens) in 0.8 s; 1 differ",
    ]


def test_an_evaluation_without_any_score_says_so() -> None:
    assert printed(
        lambda console: console.evaluation(4, None, 21.0),
        lambda console: console.evaluation(5, 0.25, 21.0, reward=0.375),
    ) == [
        "      ◆ held-out problems after 4 updates: no score  21 s",
        "      ◆ held-out problems after 5 updates: reward 0.375, 25.0% solved  21 s",
    ]


@pytest.mark.parametrize(
    ("stream", "environ"),
    [(io.StringIO(), {}), (Terminal(), {"NO_COLOR": "1"}), (Terminal(), {"TERM": "dumb"})],
)
def test_without_a_terminal_or_color_there_are_plain_narrow_lines(
    stream: io.StringIO, environ: dict[str, str]
) -> None:
    text = show(stream, environ)
    assert "\x1b" not in text
    lines = text.splitlines()
    table = [line for line in lines if "/somewhere" not in line]
    assert max(map(len, table)) <= WIDTH
    heading = next(line for line in lines if "rollout" in line)
    rows = [line for line in lines if line.split()[:1] in (["1"], ["2"], ["3"])]
    assert len(rows) == 3
    assert {len(line) for line in [heading, *rows]} == {len(heading)}, "columns do not line up"
    assert "–" in rows[1]
    for said in (
        "40.2% → 48.3%",
        "p < 0.0001",
        "9 min 21 s",
        "tlt generate runs/policy",
        "runs/metrics.jsonl",
        "long-" * 30,
        "best so far",
    ):
        assert said in text


def test_on_a_terminal_there_are_colors_and_a_panel_within_100_columns() -> None:
    text = show(Terminal(), {"TERM": "xterm-256color", "COLUMNS": "100"})
    assert "\x1b[" in text
    assert "╭─ training complete" in re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_on_a_terminal_of_80_columns_nothing_breaks_within_a_row_or_a_word() -> None:
    stream = Terminal()
    with Console(num_steps=2, stream=stream, environ={"TERM": "xterm", "COLUMNS": "80"}) as console:
        console._rich.width = 80
        console.header({"task": "countdown: 4,096 problems, 16 held out; 8 × 8 responses a step, 60 steps"})
        console.step(record(1))
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).splitlines()]
    assert any(line.endswith(" steps") for line in lines)
    table = [line for line in lines if "─" in line or "rollout" in line or line.split()[:1] == ["1"]]
    assert len(table) == 3
    assert len({len(line) for line in table}) == 1
    assert max(map(len, lines)) <= 80


ERRORS = {"num_errors": 2, "first_error": "ZeroDivisionError: in score"}
RECALLED = {"recalled_tokens": 1200, "num_tokens": 4800}


@pytest.mark.parametrize(
    ("usual", "changed", "word", "note"),
    [
        (
            {"rewards": {"num_errors": 0, "first_error": ""}},
            {"rewards": ERRORS, "rollout": {"num_responses": 8}},
            "could not be scored",
            "step 2: 2 of 8 responses could not be scored; the first: ZeroDivisionError: in score",
        ),
        (
            {"rollout": {"recalled_tokens": 0}},
            {"rollout": RECALLED},
            "journal",
            "step 2: 1,200 of its 4,800 tokens stood in the journal",
        ),
    ],
)
def test_what_is_unusual_about_a_step_is_said_below_its_row(
    usual: dict[str, Any], changed: dict[str, Any], word: str, note: str
) -> None:
    lines = printed(
        lambda console: console.step(record(1, **usual)), lambda console: console.step(record(2, **changed))
    )
    assert [line.strip() for line in lines if word in line] == [note]


def test_the_header_names_everything_before_training() -> None:
    rows = {"model": "base: llama, 3.9 M parameters", "folder": "runs/x"}
    lines = printed(lambda console: console.header(rows))
    assert lines[:2] == ["model   base: llama, 3.9 M parameters", "folder  runs/x"]


def test_ranks_that_are_not_enabled_say_nothing() -> None:
    assert show(Terminal(), {"TERM": "xterm"}, enabled=False) == ""


@pytest.mark.parametrize("width", [80, 120])
def test_a_sample_is_two_lines_within_the_screen_with_the_beginning_and_the_end_of_its_text(
    width: int,
) -> None:
    stream = Terminal()
    environ = {"TERM": "xterm"}
    with Console(stream=stream, environ=environ) as console:
        console._rich.width = width
        console.sample("Reach 24 with 3, 8.\n" * 9, "First 3 × 8 …\n" * 30 + "so it is 24", 1.0)
        console.sample("short", "语" * 300, None)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).splitlines()]
    told = [line for line in lines if line.strip() and "first step" not in line]
    assert len(told) == 4
    assert told[0].startswith("      ▸ 1.000  Reach 24 with 3, 8.")
    assert told[1].endswith("so it is 24")
    assert told[2] == "      ▸ no score  short"
    assert all(width - 4 <= cell_len(told[i]) <= width for i in (0, 1, 3))

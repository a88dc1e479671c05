"""Every `tlt` command on a page is one that the command line takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs_commands import Shown, all_commands, commands_of, mistakes_of

ROOT = Path(__file__).parents[3]
COMMANDS = [shown for shown in all_commands(ROOT) if shown.words[:1] == ["tlt"]]


def test_every_command_on_a_page_is_read_by_the_command_line() -> None:
    assert len([shown for shown in COMMANDS if shown.is_whole]) > 60
    assert [line for shown in COMMANDS for line in mistakes_of(shown)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tlt trian countdown", "unknown command"),
        ("tlt train countdown --run.num_step 3", "--run.num_step is unknown"),
        ("tlt train countdown --rnu.seed 3", "--rnu.seed is unknown"),
        ("tlt generate MODEL --prompts p.jsonl", "needs --out"),
        ("tlt task countdown --num many --out p.jsonl", "--num: is many"),
        ("tlt drafter eval DIR --model M --prompts P [--deepness 3]", "--deepness is unknown"),
    ],
)
def test_a_command_that_would_be_refused_is_found(text: str, message: str) -> None:
    (line,) = mistakes_of(Shown("docs/x.md", text))
    assert line.startswith("docs/x.md: tlt")
    assert message in line


def test_commands_are_found_in_blocks_and_in_text() -> None:
    text = "Use `tlt audit`:\n\n    tlt train a.toml \\\n        --run.seed 1   # note\n    cd x && tlt train y\n"
    found = [*commands_of("p.md", text)]
    assert [shown.text for shown in found] == [
        "tlt audit",
        "tlt train a.toml --run.seed 1",
        "cd x",
        "tlt train y",
    ]
    assert [shown.is_whole for shown in found] == [False, True, True, True]

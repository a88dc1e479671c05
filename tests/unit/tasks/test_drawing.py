"""Problems are drawn in a process with fixed hashes, which answers whatever the task prints or raises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt.base.types import UserError
from tlt.tasks.drawing import draw_alike

MODULE = """
import os, sys

def order(*words):
    print("what a taskset prints")
    os.write(1, b"or its C code")
    return list(set(words))

def wrong():
    raise KeyError("a\\nb")

def leave():
    os._exit(7)

def quit():
    sys.exit("no data here")
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drawn_things.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_set_has_the_same_order_in_every_drawing_whatever_the_task_prints() -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    drawn = [draw_alike("task x", "drawn_things:order", *some) for some in (words, words)]
    assert sorted(drawn[0]) == sorted(words)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("wrong", "the problems cannot be drawn (KeyError"),
        ("leave", "the process that draws the problems ended with exit code 7"),
        ("quit", "the problems cannot be drawn (SystemExit: no data here"),
        ("absent", "the problems cannot be drawn (AttributeError"),
    ],
)
def test_a_task_that_cannot_draw_is_one_line(function: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        draw_alike("task x", f"drawn_things:{function}")
    assert str(refused.value).startswith(f"task x: {message}")
    assert "\n" not in str(refused.value)

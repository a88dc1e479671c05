"""What cannot be printed: one line for a command whose product it is, and nothing for a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from tlt.apps.cli.main import main
from tlt.training.report.console import Console

pytestmark = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="Linux alone has a device that is always full"
)


@contextmanager
def nobody_reads() -> Iterator[TextIO]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", closefd=False) as stream:
        yield stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for what is left in its buffer


@contextmanager
def full_disk() -> Iterator[TextIO]:
    with open("/dev/full", "w", closefd=True) as stream:
        yield stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["plan", "memory", "countdown"]], ids=" ".join)
@pytest.mark.parametrize(
    ("broken", "code", "said"),
    [
        (
            full_disk,
            2,
            "tlt: error: stdout: cannot be written (No space left on device); make room, or send it "
            "elsewhere\n",
        ),
        (nobody_reads, 141, ""),
    ],
)
def test_a_command_that_cannot_print_its_product_ends_in_one_line(
    words: list[str],
    broken,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with broken() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(words) == code
        monkeypatch.undo()
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("broken", [full_disk, nobody_reads])
def test_a_console_goes_on_where_nothing_can_be_printed_and_says_so_once(
    broken, capsys: pytest.CaptureFixture[str]
) -> None:
    with broken() as stream, Console(num_steps=2, stream=stream) as console:
        for number in range(3):
            console.note(f"note {number}")
    said = capsys.readouterr().err
    assert said.startswith("tlt: stdout cannot be written (")
    assert said.count("\n") == 1


def test_a_console_without_any_stdout_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it under `>&-`
    with Console() as console:
        console.note("lost")

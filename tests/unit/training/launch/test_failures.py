"""Why an attempt ended, and whether another one follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt.base.io.processes import how_it_ended
from tlt.training.launch.failures import AttemptFailure, RankFailure, Restarts, find_cause

TRACEBACK = (
    'Traceback (most recent call last):\n  File "a.py", line {}, in step\n    1 / 0\nZeroDivisionError: {}\n'
)
KILLED = AttemptFailure(("rank 1 ended without a word: killed by SIGKILL (out of memory?)",))


def fault(line: int = 7, message: str = "division by zero") -> AttemptFailure:
    return AttemptFailure((f"rank 0 failed: ZeroDivisionError: {message}",), TRACEBACK.format(line, message))


def report(rank: int, time: float, is_user_error: bool = False) -> RankFailure:
    return RankFailure(rank, is_user_error, f"message {rank}", f"traceback {rank}\n", time)


def test_the_cause_is_what_ended_first_and_a_users_mistake_before_all() -> None:
    reports = [report(0, 1.0), report(1, 2.0), report(2, 3.0)]
    assert find_cause(reports, [1, 2], str) == AttemptFailure(("rank 1 failed: message 1",), "traceback 1\n")
    assert find_cause([*reports, report(3, 9.0, is_user_error=True)], [0], str) == AttemptFailure(
        ("message 3",), "", True
    )
    silent = find_cause(reports[:1], [2, 1], lambda rank: how_it_ended(-9))
    assert silent.causes[0] == KILLED.causes[0]
    assert len(silent.causes) == 2


def test_a_death_is_followed_by_attempts_up_to_the_limit_and_one_line_names_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    restarts = Restarts(2, lambda: "from step-00000004")
    assert [restarts.follows(KILLED) for _ in range(3)] == [True, True, False]
    first, second, last = capsys.readouterr().err.splitlines()
    assert first == f"tlt: {KILLED.causes[0]}; starting again from step-00000004 (restart 1 of 2)"
    assert second.endswith("(restart 2 of 2)")
    assert last == f"tlt: error: {KILLED.causes[0]}; not started again: run.max_restarts is 2"


def test_a_failure_that_repeats_at_the_same_line_without_progress_ends_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    restarts = Restarts(9)
    assert restarts.follows(fault(message="at 0x7f"))
    capsys.readouterr()
    assert not restarts.follows(fault(message="at 0x80"))
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("Traceback")
    assert said[-1].endswith(
        "; not started again: it failed there before, and nothing was saved since (from the beginning)"
    )


def test_the_same_line_may_fail_again_after_progress_or_another_line_without() -> None:
    places = iter(["a", "b", "b", "b"])
    restarts = Restarts(9, lambda: next(places))
    assert [restarts.follows(failure) for failure in (fault(), fault(), fault(8), fault(8))] == [
        True,
        True,
        True,
        False,
    ]


def test_what_would_steer_a_terminal_is_shown_and_carried_out_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\ud800 naïve\t☕"
    restarts = Restarts(1, log=tmp_path / "failures.log")
    assert [restarts.follows(fault(message=message)) for _ in range(2)] == [True, False]
    for text in (capsys.readouterr().err, (tmp_path / "failures.log").read_text()):
        assert r"\x1b[2J\x1b]0;title\x07\x9b31m\u202e\ud800 naïve" in text
        assert all(character.isprintable() or character in "\n\t" for character in text)
    assert "  File" in (tmp_path / "failures.log").read_text().splitlines()[2]

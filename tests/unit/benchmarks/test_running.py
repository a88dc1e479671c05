"""The long tail's curve and uses are those of the timelines, and differing responses are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.running import read_rollouts, running, uses
from tests.unit.page.synthetic import make_run
from tlt.page.time_use import Piece
from tlt.spans import Span
from tlt.types import UserError


def test_the_curve_adds_up_all_ranks_and_has_a_point_wherever_the_number_changes() -> None:
    one = [
        Span("decode", 0.0, 1.0, "off", 3),
        Span("speculate", 1.0, 2.0, "ngram", 3),
        Span("decode", 2.0, 4.0, "off", 1),
    ]
    other = [Span("decode", 1.0, 3.0, "off", 2)]
    assert running([one, other]) == [(0.0, 3), (1.0, 5), (2.0, 3), (3.0, 1), (4.0, 0)]


def test_a_rank_generates_but_where_it_trains_or_waits_and_nothing_counts_after_the_last_token() -> None:
    pieces = [
        ("prefill", 0, 1),
        ("drafts", 1, 4),
        ("drafter training", 4, 6),
        ("waiting", 6, 7),
        ("update", 7, 9),
    ]
    found = uses([Piece(use, float(start), float(end)) for use, start, end in pieces], 6.5)
    assert found == [("generates", 0.0, 4.0), ("trains", 4.0, 6.0), ("waits", 6.0, 6.5)]


def test_the_median_step_is_read_from_both_runs_unless_responses_differ(tmp_path: Path) -> None:
    for name in ("off", "tlt"):
        make_run(tmp_path / name, 3)
    turns = [{"run": run, "step": step, "num_different": 0} for step in (1, 2, 3) for run in ("off", "tlt")]
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    found = read_rollouts(tmp_path)
    assert (found["step"], found["num_steps"], found["num_responses"]) == (2, 3, 4)
    for rollout in found["rollouts"].values():
        assert rollout == {
            "seconds": 6.0,
            "running": [(1.0, 8), (3.0, 2), (6.0, 0)],
            "ranks": [[("generates", 0.0, 6.0)]] * 2,
        }
    (tmp_path / "turns.jsonl").write_text(json.dumps(turns[-1] | {"num_different": 1}) + "\n")
    with pytest.raises(UserError, match="responses differ in step 3"):
        read_rollouts(tmp_path)

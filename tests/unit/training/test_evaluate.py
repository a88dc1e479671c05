"""What an evaluation reports, on screen and to trackers."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.training.test_evaluations import make_evaluation
from tlt.base.records import RewardSummary
from tlt.training.evaluate import report
from tlt.training.report.console import Console
from tlt.training.saved.evaluations import Evaluations


@pytest.mark.parametrize("by_reward", [False, True])
def test_the_mean_reward_stands_beside_the_solve_rate_whichever_is_judged(
    by_reward: bool, tmp_path: Path
) -> None:
    stream, logged = io.StringIO(), dict[int, dict[str, float]]()
    config = SimpleNamespace(run=SimpleNamespace(num_steps=0))
    evaluations = Evaluations(tmp_path / "evaluations.jsonl", 0, writes=True, by_reward=by_reward)
    run: Any = SimpleNamespace(config=config, step=4, files=SimpleNamespace(evaluations=evaluations))
    run.tracking = SimpleNamespace(log=logged.__setitem__)
    with Console(stream=stream, environ={}) as run.console:
        report(run, make_evaluation(4, 1.0, 0.5), RewardSummary(9.25, 0.75))
    assert "held-out problems after 4 updates: reward 9.250, 75.0% solved" in stream.getvalue()
    assert logged == {4: {"eval/solve_rate": 0.75, "eval/reward": 9.25, "eval/seconds": 2.5}}

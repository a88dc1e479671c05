"""A run measures its speedup where that is due, and is the same run without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.training.test_evaluated_runs import base, make_config, weights
from tlt.base.clock import Moment
from tlt.base.config.schema import Config
from tlt.base.speculation import parse_speculation
from tlt.training import speedup
from tlt.training.launch.signals import StopRequest
from tlt.training.loop import describe_run, main
from tlt.training.report.step_record import StepRecord, read_metrics
from tlt.training.speedup import is_pair_due

__all__ = ["base"]


def config_of(base: Path, out_dir: Path, every: int, speculation: str = "adaptive") -> Config:
    config = make_config(base, out_dir)
    rollout = config.rollout.model_copy(
        update={"speculation": parse_speculation(speculation), "measure_speedup_every": every}
    )
    return config.model_copy(update={"rollout": rollout})


def steps_of(base: Path, out_dir: Path, *given: Any) -> list[StepRecord]:
    main(describe_run(config_of(base, out_dir, *given), Moment.now()), StopRequest())
    return read_metrics(out_dir / "metrics.jsonl")


def test_a_run_that_measures_its_speedup_is_token_for_token_the_run_that_does_not(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speedup, "MAX_SHARE", 100.0)
    monkeypatch.setattr(speedup, "MIN_TOKENS", 1)
    measured = steps_of(base, tmp_path / "measured", 2)
    said = " ".join(capsys.readouterr().out.split())
    plain = steps_of(base, tmp_path / "plain", 0)
    assert [one.speedup.num_tokens > 0 for one in measured] == [False, True, False]
    assert measured[1].speedup.num_different == 0
    assert 0 < measured[1].speedup.seconds < measured[1].step_seconds
    assert [one.rewards for one in measured] == [one.rewards for one in plain]
    assert (weights(tmp_path / "measured" / "policy") == weights(tmp_path / "plain" / "policy")).all()
    assert f"step 2: speedup {measured[1].speedup.speedup:.2f}, measured on" in said
    assert f"speedup {measured[1].speedup.speedup:.2f}, measured on 1 pair of rollouts" in said
    assert all(one.speedup.num_tokens == 0 for one in plain)
    assert "speedup/speedup" in measured[1].figures()
    assert not [name for name in plain[1].figures() if name.startswith("speedup")]


@pytest.mark.parametrize(
    ("every", "num_steps", "due"),
    [(0, 9, []), (3, 9, [3, 6, 9]), (20, 5, [5]), (20, 41, [20, 40])],
)
def test_a_pair_is_due_every_so_many_steps_and_at_the_end_of_a_shorter_run(
    every: int, num_steps: int, due: list[int]
) -> None:
    rollout, engine = (
        SimpleNamespace(measure_speedup_every=every),
        SimpleNamespace(tuner=1, generates_without_side_effects=True),
    )
    config = SimpleNamespace(rollout=rollout, run=SimpleNamespace(num_steps=num_steps))
    models = SimpleNamespace(engine=engine)
    runs: list[Any] = [SimpleNamespace(config=config, models=models, step=step) for step in range(num_steps)]
    assert [run.step + 1 for run in runs if is_pair_due(run)] == due

"""What this project measures about itself: arms, replays, plots. Timings decide nothing here."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from benchmarks.arms import ArmCosts, BestArms, Step, Turns, record_arms
from benchmarks.plots import plot_longtail, plot_regret
from benchmarks.replay import RecordedCosts, replay
from benchmarks.rollout import main
from benchmarks.traces import side_by_side, trace
from tests.lossless.helpers import CONFIG, make_engine, make_policy
from tlt.tuning.cost_model import CostModel
from tlt.tuning.tuner import Fixed
from tlt.types import BatchState, Request, SamplingParams, StepOutcome, Strategy

OFF, SHORT, LONG = Strategy.OFF, Strategy("learned", 2, 1, 2), Strategy("learned", 6, 1, 6)
POLICY = make_policy()


def requests(helping: int, num: int = 4) -> list[Request]:
    rng = random.Random(helping)
    params = SamplingParams(max_tokens=40)
    return [Request(f"{helping}/{i}", 0, tuple(rng.randrange(CONFIG.vocab_size) for _ in range(4)), params) for i in range(num)]


def test_turns_give_every_arm_as_many_steps_at_the_wanted_batch_and_count_no_first_one() -> None:
    engine = make_engine(POLICY, Fixed(OFF))
    costs = record_arms(engine, requests, [OFF, SHORT, LONG], batch_size=3, temperature=1.0, num_rounds=4, turn=3)
    assert {arm: len(steps) for arm, steps in costs.steps.items()} == {OFF: 8, SHORT: 8, LONG: 8}
    for arm, steps in costs.steps.items():
        assert all(sum(step.histogram) == 3 and len(step.histogram) == arm.depth + 1 for step in steps)
    again = ArmCosts.from_json(json.loads(json.dumps(costs.to_json())))
    assert again.steps.keys() == costs.steps.keys()
    for arm in costs.steps:
        assert again.speed(arm) == pytest.approx(costs.speed(arm), rel=0.02)
        assert again.accept_length(arm) == costs.accept_length(arm)


def test_speed_and_accept_length_are_sums_over_sums() -> None:
    costs = ArmCosts(4, 1.0)
    costs.steps[SHORT] = [Step(0.5, (1, 2, 1)), Step(0.25, (4, 0, 0))]
    assert costs.speed(SHORT) == (1 + 4 + 3 + 4) / 0.75
    assert costs.accept_length(SHORT) == 12 / 8


def test_other_batch_sizes_are_decoded_plainly_and_not_recorded() -> None:
    turns = Turns([SHORT], batch_size=4, temperature=1.0, turn=2)
    other = BatchState(3, 10.0, 0, 0)
    assert turns.choose(other) == OFF
    turns.observe(OFF, other, StepOutcome(3, (), (), 1.0))
    assert not turns.costs.steps


def make_costs() -> RecordedCosts:
    """OFF is best from 16 on, LONG at 1."""
    recorded = []
    for size in (1, 4, 16):
        costs = ArmCosts(size, 1.0)
        costs.steps[OFF] = [Step(0.010, (size,))] * 4
        costs.steps[SHORT] = [Step(0.012 + 0.0015 * size, (0, 0, size))] * 4
        costs.steps[LONG] = [Step(0.014 + 0.004 * size, (0, 0, 0, 0, 0, 0, size))] * 4
        recorded.append(costs)
    return RecordedCosts(recorded)


def test_a_replay_charges_what_was_recorded_and_regrets_what_the_best_arm_would_have_saved() -> None:
    costs = make_costs()
    plain = replay(Fixed(OFF), costs, [5, 5, 5, 5], max_batch=4, seed=0)
    assert plain.times[-1] == pytest.approx(5 * 0.010)
    assert plain.tokens[-1] == 20
    best = costs.best_speed(4)
    assert plain.share_of_best() == pytest.approx((4 / 0.010) / best)
    table = BestArms(costs.costs)
    perfect = replay(table, costs, [100] * 16 + [2000], max_batch=16, seed=0)
    assert perfect.share_of_best() > 0.97
    assert perfect.running[-1] == 1


def test_between_recorded_batch_sizes_costs_are_interpolated_in_logarithms() -> None:
    costs = make_costs()
    expected = math.sqrt(costs.speed(LONG, 4) * costs.speed(LONG, 16))
    assert costs.speed(LONG, 8) == pytest.approx(expected)
    assert costs.draw(LONG, 8, random.Random(0)).seconds == pytest.approx(math.sqrt((0.014 + 0.016) * (0.014 + 0.064)))
    assert costs.draw(OFF, 200, random.Random(0)).num_tokens == 200, "beyond the largest: as at the largest"


def test_whole_rollouts_side_by_side_do_the_same_work() -> None:
    work = requests(0, 6)
    traces, num_different = side_by_side(
        {"off": lambda: make_engine(POLICY), "on": lambda: make_engine(POLICY, Fixed(LONG))}, work, num_rounds=2
    )
    assert num_different == 0
    for measured in (*traces["off"], *traces["on"]):
        assert measured.tokens[-1] == traces["off"][0].tokens[-1]
        assert measured.running[-1] == 0
        assert list(measured.times) == sorted(measured.times)
        assert 0 < measured.seconds_since(0.5) < measured.seconds_since(0.0) == measured.seconds
    _, other = side_by_side(
        {"off": lambda: make_engine(POLICY), "wrong": lambda: make_engine(make_policy(seed=9))}, work, num_rounds=1
    )
    assert other > 0, "responses that differ are counted"


def test_plots_are_files_that_do_not_change_from_one_drawing_to_the_next(tmp_path: Path) -> None:
    costs = make_costs()
    replays = {"cost model": [replay(CostModel([OFF, SHORT]), costs, [40] * 5, 4, seed) for seed in range(2)]}
    _, measured = trace(make_engine(POLICY), requests(0))
    for name in ("a", "b"):
        plot_regret(replays, tmp_path / f"{name}1.svg")
        plot_longtail({"off": measured}, tmp_path / f"{name}2.svg")
    for number in (1, 2):
        first, second = ((tmp_path / f"{name}{number}.svg").read_bytes() for name in "ab")
        assert first == second
        assert b"<svg" in first


RECIPE = Path(__file__).parents[2] / "recipes/countdown"
FEW = ("--task.num_problems", "64")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--parts", "all"], "--parts: 'all' is unknown; give some of longtail, arms"),
        (["--peers", "sglang"], "--peers: 'sglang' is unknown"),
        (["--peers", "vllm"], "--peers: vllm needs the interpreter"),
        (["--variants", "fast"], "'fast' is no strategy"),
        (["--recorded", "nowhere.json"], "--recorded: nowhere.json does not exist"),
        (["--parts", "longtail", "--workload", "nowhere.json"], "nowhere.json: does not exist"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = main([str(RECIPE / "quickstart.toml"), "--out", str(tmp_path / "x"), "--run.num_ranks", "1", *FEW, *arguments])
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert error.count("\n") == 0
    assert part in error


def test_the_command_measures_writes_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Small, with the shipped model: arms, replay, the long tail and a peer, once each."""
    whole = json.loads((RECIPE / "longtail.json").read_text())
    whole["requests"] = sorted(whole["requests"], key=lambda r: r["length"])[:6]
    (tmp_path / "few.json").write_text(json.dumps(whole))
    arguments = ["--out", str(tmp_path / "result"), "--parts", "arms,longtail", "--workload", str(tmp_path / "few.json")]
    amounts = ["--batches", "2", "--rounds", "2", "--arm-rounds", "1", "--peers", "transformers", *FEW]
    assert main([str(RECIPE / "quickstart.toml"), *arguments, *amounts]) == 0
    assert "longtail, 6 requests" in capsys.readouterr().out
    report = json.loads((tmp_path / "result.json").read_text())
    assert {m["kind"] for m in report["measurements"]} == {"arms", "longtail", "replay", "peer"}
    (longtail,) = (m for m in report["measurements"] if m["kind"] == "longtail")
    assert longtail["num_different"] == 0
    assert {"off", "adaptive", "best arms"} == longtail["tokens_per_second"].keys()
    assert "## Peers on the same prompts and lengths" in (tmp_path / "result.md").read_text()
    assert {path.name for path in tmp_path.glob("*.svg")} == {"result-longtail.svg", "result-regret.svg"}
    assert str(RECIPE.parents[1]) not in json.dumps(report["config"])

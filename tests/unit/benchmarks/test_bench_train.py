"""The arithmetic of `tlt bench train`, on runs written by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

import tlt
from tests.unit.report.records import record
from tlt.bench.report import header, with_changes
from tlt.bench.train import OFF, VARIANTS, Plan, describe_round
from tlt.bench.train_report import Turn, ceiling, phase_seconds, summarize_runs, train_markdown
from tlt.cli.main import main
from tlt.config.load import load_config
from tlt.report.record import MetricsWriter
from tlt.report.timeline import Timeline, rank_path
from tlt.spans import Span, SpanName
from tlt.types import UserError

RECIPES = Path(__file__).parents[3] / "recipes" / "countdown"


def test_what_drafts_from_other_responses_is_off_where_nothing_drafts() -> None:
    config = load_config(RECIPES / "headline.toml", ["--rollout.ahead", "adaptive"])
    configs = Plan({"off": OFF, **VARIANTS}, 1, 1.0).configs(config)
    assert [configs[name].rollout.ahead for name in ("off", "tlt", "frozen")] == [0, "adaptive", "adaptive"]


@pytest.mark.parametrize("recipe", ["countdown/headline.toml", "smollm2/reasoning.toml"])
def test_a_report_names_no_folder_of_the_machine(recipe: str) -> None:
    config = load_config(RECIPES.parent / recipe, ["--model.path", str(RECIPES / "base")])
    assert str(RECIPES.parent) not in json.dumps(header(config, "command"))


def test_changes_that_contradict_the_rest_are_one_line() -> None:
    config = load_config(RECIPES / "headline.toml", ["--rollout.ahead", "1"])
    with pytest.raises(
        UserError, match=r"^bench: with rollout\.speculation changed: rollout\.ahead is 1, but nothing would"
    ) as refused:
        with_changes(config, {"rollout": {"speculation": "off"}})
    assert "\n" not in str(refused.value)


def test_the_ceiling_is_amdahls() -> None:
    """A step of 8 s of rollout and 2 s of the rest: 10 / (2 + 8 / S)."""
    assert ceiling(0.8, 1.0) == pytest.approx(1.0)
    assert ceiling(0.8, 2.0) == pytest.approx(10 / 6)
    assert ceiling(0.8, math.inf) == pytest.approx(5.0)


def test_phases_are_means_over_ranks_and_steps_and_what_no_span_covers_is_other() -> None:
    steps = [Span("step", 0, 10), Span("step", 11, 15)]
    first = [Span("decode", 0, 6), Span("update", 7, 9), Span("publish", 10.5, 11), *steps]
    second = [Span("decode", 0, 2), Span("train drafter", 2, 6), Span("decode", 11, 15), *steps]
    seconds = phase_seconds({0: first, 1: second})
    assert seconds == {"decode": 12 / 4, "update": 2 / 4, "train drafter": 4 / 4, "other": (2 + 4 + 4) / 4}


def test_what_is_covered_twice_is_missing_from_other_once() -> None:
    training = [Span("train drafter", 0, 6), Span("preempt", 5, 6), Span("check drafter", 6, 8)]
    spans = [*training, Span("step", 0, 10)]
    seconds = phase_seconds({0: spans})
    assert seconds == {"train drafter": 6, "preempt": 1, "check drafter": 2, "other": 2}


def test_spans_have_no_name_that_is_not_listed() -> None:
    """Read in the source: names given as text to whatever makes a span."""
    calls = re.compile(r"""(?:\bSpan\(|\.span\(|timeline\.record\()[^,\n)]*""")
    package = Path(tlt.__file__).parent
    found = [call for path in package.rglob("*.py") for call in calls.findall(path.read_text())]
    literal = {name for call in found for name in re.findall(r'"([^"]+)"', call)}
    assert len(found) > 10
    assert literal <= set(SpanName), f"not in SpanName: {sorted(literal - set(SpanName))}"


def write_run(
    folder: Path, name: str, rollouts: list[float], accept_length: float, num_different: list[int]
) -> None:
    """A run whose steps have these rollout seconds and 2 s besides: 1.5 of them the update, 0.5 the
    record."""
    timeline = Timeline(0, rank_path(folder / name, 0))
    with (
        MetricsWriter(folder / name / "metrics.jsonl", 0) as writer,
        (folder / "turns.jsonl").open("a") as turns,
    ):
        for step, seconds in enumerate(rollouts, 1):
            start = 100.0 * step
            timeline.record("decode", start, start + seconds)
            timeline.record("train drafter", start + seconds, start + seconds + 0.1)
            timeline.record("step", start, start + seconds + 1.5)
            rollout = {"seconds": seconds, "accept_length": accept_length}
            rollout |= {"num_responses": 32, "num_tokens": 64}
            parts = {"rollout": rollout, "idle": {"seconds": 4.0}, "drafter": {"train_seconds": 3.0}}
            writer.write(record(step, step_seconds=seconds + 1.5, cpu_seconds=2 * seconds, **parts))
            if step <= len(num_different):
                differ = num_different[step - 1]
                turn = Turn(name, step, seconds + 2, differ, same_weights=not differ, digest="d")
                turns.write(json.dumps(dataclasses.asdict(turn)) + "\n")
    timeline.flush()


def test_a_summary_pairs_the_steps_that_all_runs_finished(tmp_path: Path) -> None:
    write_run(tmp_path, "off", [8.0, 18.0], math.nan, [0, 0])
    write_run(tmp_path, "tlt", [3.0, 8.0, 99.0], 3.0, [0, 2])  # the third step is of a round that was stopped
    report = summarize_runs(tmp_path, ("off", "tlt"))
    off, tlt = report["runs"]["off"], report["runs"]["tlt"]
    assert report["num_steps"] == 2
    assert tlt["ratios"]["off"]["values"] == (10 / 5, 20 / 10)
    assert tlt["ratios"]["off"]["mean"] == pytest.approx(2.0)
    assert tlt["rollout_speedup"]["mean"] == pytest.approx(math.sqrt(8 / 3 * 18 / 8))
    assert off["rollout_share"] == pytest.approx(26 / 30)
    assert tlt["ceiling"] == pytest.approx(ceiling(26 / 30, math.sqrt(6)))
    assert off["cpu_seconds"] == 26.0
    assert (off["accept_length"], tlt["accept_length"]) == (None, 3.0)
    assert tlt["harvested_share"] == pytest.approx(6 / 8)
    assert tlt["phase_seconds"]["record"] == pytest.approx(0.5)
    assert off["drafter_training_on_critical_path"] == pytest.approx(0.2 / 29)
    assert (tlt["num_different"], tlt["num_steps_with_same_weights"]) == (2, 1)

    config = load_config(RECIPES / "headline.toml")
    text = train_markdown("Title", {**header(config, "command"), **report})
    assert "| step time, off / run | – | 2.00 (2.00 – 2.00) |" in text
    assert "| responses that differ from off's, of 64 | 0 | 2 |" in text
    assert "| train drafter | 0.100 | 0.100 |" in text
    assert "r = 86.7%" in text


def test_people_are_told_steps_counted_from_1() -> None:
    turns = [Turn(name, 1, 1.5, 0, same_weights=True, digest="d") for name in ("off", "tlt")]
    assert describe_round(turns) == "step 1: off 1.5 s, tlt 1.5 s; same tokens"


def test_without_a_finished_round_there_is_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not one round was finished; give it more --minutes"):
        summarize_runs(tmp_path, ("off", "tlt"))
    write_run(tmp_path, "frozen", [1.0], 3.0, [0])
    with pytest.raises(UserError, match="holds a run 'frozen'; include it, or give another"):
        summarize_runs(tmp_path, ("off", "tlt"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--variants", "tlt,thawed"], "--variants: 'thawed' is unknown; give some of tlt, frozen, ahead"),
        (["--variants", ""], "--variants: is empty"),
        (["--steps", "0"], "--steps: is 0; it must be greater than or equal to 1"),
        (["--minutes", "-1"], "--minutes: is -1; it must be greater than 0"),
        (["--rollout.speculation", "off"], "rollout.speculation: is off, so nothing can be compared"),
        (
            ["--drafter.train", "false"],
            "--variants: frozen differs from tlt only where drafter.train is true",
        ),
        (["--out", f"{__file__}/x"], "is no folder; give another path"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = main(["bench", "train", str(RECIPES / "headline.toml"), "--out", str(tmp_path / "x"), *arguments])
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert error.count("\n") == 0
    assert part in error

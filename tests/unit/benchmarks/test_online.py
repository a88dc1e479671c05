"""Online against frozen, on runs written by hand: which runs there are, and what their figures mean."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from benchmarks.online import parse, runs_of, summarize, to_markdown, with_harder_problems
from tests.unit.benchmarks.test_bench_train import write_run
from tlt.bench.report import header
from tlt.bench.train import Plan
from tlt.training.problems import load_problems, problems_of_step
from tlt.types import UserError

WORDS = ["countdown", "--out", "x"]
DRAFTER = str(Path(__file__).parents[3] / "recipes" / "countdown" / "drafter")


def test_each_drafter_has_a_frozen_and_an_online_run_which_differ_in_training_alone() -> None:
    options, config = parse([*WORDS, "--drafters", f"a={DRAFTER},b={DRAFTER}", "--rates", "b=1e-3"])
    configs = Plan(runs_of(options.drafters, options.rates), 1, 1.0).configs(config)
    assert list(configs) == ["off", "a frozen", "a online", "b frozen", "b online"]
    assert configs["off"].rollout.speculation == "off"
    for name, train, rate in (
        ("a frozen", False, config.drafter.learning_rate),
        ("a online", True, config.drafter.learning_rate),
        ("b frozen", False, config.drafter.learning_rate),
        ("b online", True, 1e-3),
    ):
        expected = config.model_dump()
        expected["drafter"] |= {"path": Path(DRAFTER), "train": train, "learning_rate": rate}
        expected["run"]["out_dir"] = config.run.out_dir / name
        expected["rollout"]["times_off_every"] = 0
        assert configs[name].model_dump() == expected


def test_ratios_above_1_say_that_training_made_it_faster_and_longer_accepted(tmp_path: Path) -> None:
    write_run(tmp_path, "off", [8.0, 18.0], math.nan, [0, 0])
    write_run(tmp_path, "a frozen", [4.0, 10.0, 99.0], 3.0, [0, 0])
    write_run(tmp_path, "a online", [2.0, 4.0], 4.5, [0, 0])
    names = ("off", "a frozen", "a online")
    _, config = parse([*WORDS, "--drafters", f"a={DRAFTER}"])
    text = to_markdown({**header(config, "command"), **summarize(tmp_path, names)})
    row = next(line for line in text.splitlines() if line.startswith("| a |"))
    assert re.sub(r" \([^)]*\)", "", row) == "| a | 1.73 | 2.24 | 1.50 | 3 |"  # √(1.5 · 2), √(2 · 2.5)
    assert "| steps 1 – 1 | steps 2 – 2 |" in text
    assert "| accept length, a frozen | 3.00 | 3.00 |" in text
    assert "| accept length, a online / frozen | 1.50 | 1.50 |" in text
    assert "| step time, off / a online | 2.50 | 3.33 |" in text
    assert "| step time, a frozen / online | 1.50 | 2.00 |" in text


def test_harder_problems_are_asked_from_their_step_on(tmp_path: Path) -> None:
    words = ["--task.options", '{"mix": {"2": 1}}', "--harder", '{"mix": {"4": 1}}', "--harder-from", "3"]
    amounts = ["--steps", "5", "--rollout.problems_per_step", "2", "--run.out_dir", str(tmp_path)]
    options, config = parse([*WORDS, "--drafters", f"a={DRAFTER}", *words, *amounts])
    problems = load_problems(with_harder_problems(config, options), "train")
    taken = [problems_of_step(problems, step, 2, config.run.seed) for step in range(5)]
    assert [[len(p.data["numbers"]) for p in step] for step in taken] == [[2, 2]] * 3 + [[4, 4]] * 2
    assert len({p.problem_id for p in problems}) == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drafters", "a=nowhere"], "--drafters: a names no folder; give NAME=FOLDER"),
        (["--drafters", f"a={DRAFTER}", "--rates", "c=1"], "--rates: c is none of --drafters"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse([*WORDS, *words])

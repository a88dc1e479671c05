"""Whole runs of one rank in this process: they are evaluated where it is due, whatever stops them or has
no score, and best/ is of the best evaluation that they have."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tlt.apps.run.start import go_back
from tlt.base.clock import Moment
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.io.recipes import find_recipe
from tlt.base.types import UserError
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.families import load_model_config
from tlt.models.hf.weights import save_model
from tlt.training.launch.signals import StopRequest
from tlt.training.loop import describe_run, main
from tlt.training.report.step_record import read_metrics
from tlt.training.report.versions import read_environments
from tlt.training.saved.evaluations import Evaluation, read_evaluations

BASE = find_recipe("countdown").parent / "base"
HERE = "tests.unit.training.test_evaluated_runs"
NUM_STEPS = 3


class Rows:
    def problems(self, num: int, seed: int, split: str = "train") -> list[dict[str, Any]]:
        return [
            {"problem_id": f"{split}-{i}", "prompt": f"[{i % 9 + 1},{i % 7 + 1}:{i + 1}]"} for i in range(num)
        ]

    def score(self, problem: dict[str, Any], text: str) -> dict[str, Any]:
        raise AssertionError("the functions score alone")


TASK = Rows()


@dataclasses.dataclass
class Judge:
    """What the reward function does: it raises for ids of these beginnings after so many updates, and asks
    the run to stop in such an evaluation. bonus: of held-out responses, by updates, so that a test says
    which evaluation is the best; a response is solved from a reward of 2 on, and none is without a bonus."""

    fails: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    bonus: dict[int, float] = dataclasses.field(default_factory=dict)
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)
    stops_at: tuple[int, str] | None = None

    def score(self, problem_id: str, text: str, step: int) -> float:
        if self.stops_at is not None and step == self.stops_at[0] and problem_id.startswith(self.stops_at[1]):
            self.stop.signal = signal.SIGINT
        if problem_id.startswith(self.fails.get(step, ())):
            raise KeyError("target")
        share = sum(character.isdigit() for character in text) / max(len(text), 1)
        return share + (self.bonus.get(step, 0.0) if problem_id.startswith("test") else 0.0)


judges = [Judge()]


def digits(completions: list[str], problem_id: list[str], trainer_state: Any) -> list[float]:
    step, pairs = trainer_state.global_step, zip(problem_id, completions, strict=True)
    return [judges[-1].score(*pair, step) for pair in pairs]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy with Countdown's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = ModelConfig(
        "llama", load_model_config(BASE).vocab_size, 32, 64, 1, 4, 2, 8, tie_embeddings=True, max_positions=64
    )
    save_model(
        folder,
        config,
        Transformer(config).initialize(0, std=0.15).state_dict(),
        dtype=torch.float32,
        source=BASE,
    )
    return folder


def make_config(base: Path, out_dir: Path, function: str = "digits") -> Config:
    return load_config(
        {
            "run": {"num_steps": NUM_STEPS, "num_ranks": 1, "out_dir": out_dir}
            | {"device": "cpu", "dtype": "float64", "checkpoint_every": 1, "keep_checkpoints": 9},
            "model": {"path": base},
            "task": {"name": f"{HERE}:TASK", "num_problems": 4},
            "rollout": {"problems_per_step": 2, "samples_per_problem": 2, "speculation": "off"},
            "sampling": {"max_tokens": 8},
            "optimizer": {"learning_rate": 3e-3},
            "evaluation": {"every": 1, "num_problems": 2, "samples_per_problem": 2},
            "rewards": {"num_workers": 0, "functions": [f"{HERE}:{function}"], "solved_at": 2.0},
        }
    )


def go(base: Path, out_dir: Path, **judge: Any) -> None:
    """Begins the run in the folder, or goes on with it, as a rank does."""
    judges.append(Judge(**judge))
    main(describe_run(make_config(base, out_dir), Moment.now()), judges[-1].stop)


def evaluations(out_dir: Path) -> list[Evaluation]:
    return [dataclasses.replace(one, seconds=0.0) for one in read_evaluations(out_dir / "evaluations.jsonl")]


def held_in_best(out_dir: Path) -> int:
    step: int = json.loads((out_dir / "best" / "config.json").read_text())["tlt_evaluation"]["step"]
    return step


def weights(folder: Path) -> torch.Tensor:
    return torch.cat(
        [tensor.flatten() for _, tensor in sorted(load_file(folder / "model.safetensors").items())]
    )


def same_weights(one: Path, other: Path) -> bool:
    return torch.equal(weights(one), weights(other))


SECOND_IS_BEST = {2: 5.0}


@pytest.fixture(scope="module")
def straight(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs; its evaluation after two updates is the best."""
    out_dir = tmp_path_factory.mktemp("straight") / "run"
    go(base, out_dir, bonus=SECOND_IS_BEST)
    return out_dir


def test_a_run_of_no_steps_only_evaluates_and_can_be_gone_on_with(
    straight: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(base, tmp_path / "run")
    alone = config.model_copy(update={"run": config.run.model_copy(update={"num_steps": 0})})
    judges.append(Judge(bonus={0: 5.0}))
    main(describe_run(alone, Moment.now()), judges[-1].stop)
    said = " ".join(capsys.readouterr().out.split())
    assert "100.00% of 2 held-out problems, standard error 0.00%" in said
    (found,) = evaluations(tmp_path / "run")
    assert found.by_problem == evaluations(straight)[0].by_problem | {"test-0": 1.0, "test-1": 1.0}
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not left & {"policy", "best", "checkpoints", "adapter"}
    go(base, tmp_path / "run", bonus=SECOND_IS_BEST)
    assert [one.step for one in evaluations(tmp_path / "run")] == [0, 1, 2, 3]
    assert same_weights(tmp_path / "run" / "policy", straight / "policy")
    assert [one["ranks"] for one in read_environments(tmp_path / "run")] == [1, 1], "a line for each start"
    assert [one["ranks"] for one in read_environments(tmp_path / "run")] == [1, 1], "a line for each start"


@pytest.mark.parametrize("step", [0, 2, 3])
def test_a_run_that_was_stopped_in_an_evaluation_begins_with_it_and_is_the_run_never_stopped(
    step: int, straight: Path, base: Path, tmp_path: Path
) -> None:
    out_dir = tmp_path / "run"
    go(base, out_dir, bonus=SECOND_IS_BEST, stops_at=(step, "test"))
    assert [one.step for one in evaluations(out_dir)] == list(range(step)), "it was stopped amid that one"
    go(base, out_dir, bonus=SECOND_IS_BEST)
    assert evaluations(out_dir) == evaluations(straight)
    assert held_in_best(out_dir) == 2
    for folder in ("best", "policy"):
        assert same_weights(out_dir / folder, straight / folder)


def test_an_incomplete_evaluation_judges_nothing_and_is_done_again_by_a_run_that_goes_on(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "run"
    go(base, out_dir, bonus={3: 9.0}, fails={3: ("test-1",)})
    said = " ".join(capsys.readouterr().out.split())
    assert not same_weights(out_dir / "best", out_dir / "policy"), (
        "what was scored of the last evaluation is the best of all"
    )
    assert (
        "evaluation after 3 updates: 2 responses could not be scored, so it is not compared with others; "
        "the first: " in said
    )
    assert "the evaluation after 3 updates is left out: 2 of its responses have no score" in said
    last = evaluations(out_dir)[-1]
    assert (last.step, last.num_unscored, [*last.by_problem]) == (3, 2, ["test-0"])
    go(base, out_dir, bonus={3: 9.0})
    said = " ".join(capsys.readouterr().out.split())
    assert same_weights(out_dir / "best", out_dir / "policy")
    assert held_in_best(out_dir) == 3
    assert [(one.step, one.num_unscored) for one in evaluations(out_dir)] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert "is left out" not in said
    assert "for 3 steps and the evaluations; " in said, "another attempt took most of the time"


def test_an_evaluation_before_training_without_any_score_ends_the_run_in_one_line(
    base: Path, tmp_path: Path
) -> None:
    expected = (
        r"none of the 4 responses of the evaluation before training could be scored; .*KeyError: 'target'"
    )
    with pytest.raises(UserError, match=expected):
        go(base, tmp_path / "run", fails={0: ("test",)})
    with pytest.raises(UserError, match="none of the 4 responses of step 1 could be scored"):
        go(base, tmp_path / "run", fails={0: ("train",)})


def test_a_later_step_without_any_score_moves_nothing_whichever_attempt_takes_it(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {1: ("train",)}
    go(base, tmp_path / "whole", fails=lost)
    said = capsys.readouterr().out
    go(base, tmp_path / "two", fails=lost, stops_at=(1, "test"))
    go(base, tmp_path / "two", fails=lost)
    assert same_weights(tmp_path / "whole" / "policy", tmp_path / "two" / "policy")
    for out_dir in (tmp_path / "whole", tmp_path / "two"):
        assert [record.rewards.num_errors for record in read_metrics(out_dir / "metrics.jsonl")] == [0, 4, 0]
        after_one, after_two = evaluations(out_dir)[1:3]
        assert after_one.by_problem == after_two.by_problem, "the policy is the same"
        assert after_one.reward_by_problem == after_two.reward_by_problem
    assert "step 2: 1 of 1 optimizer steps are not taken, for no response counts in them" in said


@pytest.mark.parametrize(("to", "left"), [(1, None), (2, 2)])
def test_what_lies_in_best_is_never_the_policy_of_an_evaluation_that_the_run_has_gone_back_behind(
    to: int, left: int | None, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best evaluation left is that of step 0, whose policy is gone, or that of the very step gone back
    to."""
    out_dir, best_before = tmp_path / "run", 0 if left is None else left
    go(base, out_dir, bonus={best_before: 1.2, 3: 9.0})
    assert same_weights(out_dir / "best", out_dir / "policy")
    go_back(out_dir / "checkpoints" / f"step-{to:08d}")
    capsys.readouterr()
    go(base, out_dir, bonus={best_before: 1.2}, stops_at=(to, "train"))
    said = capsys.readouterr().out
    assert [one.step for one in evaluations(out_dir)] == list(range(to + 1))
    if left is None:
        assert not (out_dir / "best").exists()
        assert "best: was of the evaluation after 3 updates, which the run has gone back behind, and" in said
        assert "the best policy left, that before training, had been replaced by it; it is removed" in said
        return
    config = load_config(make_config(base, tmp_path / "two").model_dump(mode="json"), {"run.num_steps": left})
    main(describe_run(config, Moment.now()), StopRequest())
    assert same_weights(out_dir / "best", tmp_path / "two" / "policy")
    assert held_in_best(out_dir) == left
    assert "which the run has gone back behind; now it is of the one after 2 updates" in said


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_policy_is_saved_in_the_type_of_its_start_or_in_float64(
    dtype: str, base: Path, tmp_path: Path
) -> None:
    config = make_config(base, tmp_path / "run")
    run = config.run.model_copy(update={"num_steps": 1, "dtype": dtype})
    judges.append(Judge())
    main(describe_run(config.model_copy(update={"run": run}), Moment.now()), judges[-1].stop)
    for folder in ("policy", "best"):
        assert weights(tmp_path / "run" / folder).dtype == getattr(torch, dtype)
        described = json.loads((tmp_path / "run" / folder / "config.json").read_text())
        assert described["torch_dtype"] == dtype

"""The recipes of the paper, scaled down to two cores: the same configuration and the same parallel layout,
on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.golds import STORIES
from tlt.base.io.recipes import find_recipe
from tlt.training.report.step_record import read_metrics

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[3] / "recipes" / "paper"
SMALL = {
    "run.device": "cpu",
    "run.num_ranks": "2",
    "run.num_steps": "2",
    "run.checkpoint_every": "0",
    "task.name": STORIES,
    "task.data": "none",
    "task.split": "none",
    "task.options": "{}",
    "task.num_problems": "16",
    "rollout.problems_per_step": "2",
    "rollout.samples_per_problem": "4",
    "sampling.max_tokens": "48",
    "evaluation.num_problems": "0",
    "evaluation.data": "none",
    "evaluation.split": "none",
    "rewards.num_workers": "0",
}


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_a_recipe_runs_scaled_down_with_its_own_layout(recipe: str, tmp_path: Path) -> None:
    """Sharded over two ranks, computed in bfloat16, activations checkpointed."""
    keys = {
        **SMALL,
        "model.path": str(find_recipe("math").parent / "base"),
        "run.out_dir": str(tmp_path / "run"),
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "tlt", "train", str(RECIPES / f"{recipe}.toml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "policy sharded (FSDP2)" in done.stdout
    assert "computed in bfloat16, activations checkpointed" in done.stdout
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record.rollout.num_responses for record in records] == [8, 8]

"""Whole runs in two hundred arrangements of folders: no file of the user's differs afterwards."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.integration.conftest import Tlt
from tests.unit.training.saved.arrangements import arrange, scatter

WORDS = """--run.num_steps 1 --run.num_ranks 1 --run.keep_responses 1 --run.checkpoint_every 1 --task.name digits:TASK
    --rewards.num_workers 0 --rollout.problems_per_step 2 --rollout.samples_per_problem 2 --sampling.max_tokens 8
    --rollout.speculation 2x1x2 --evaluation.num_problems 2 --task.num_problems 4 --lora.rank 2"""


@pytest.fixture
def sources(workspace: Path) -> dict[str, Path]:
    rows = "".join(f'{{"prompt": "[{i},{i}:{i}]"}}\n' for i in range(1, 9))
    (workspace / "data.jsonl").write_text(rows)
    return {
        "model.path": workspace / "model",
        "drafter.path": workspace / "drafter",
        "task.data": workspace / "data.jsonl",
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_no_file_of_the_users_differs_after_a_run_and_its_resumption(
    seed: int, workspace: Path, sources: dict[str, Path], tmp_path: Path, tlt_here: Tlt
) -> None:
    draw, num_run = random.Random(100 + seed), 0
    for number in range(20):
        made = arrange(tmp_path / str(number), sources, draw)
        before = made.digest()
        given = {**made.inputs, "evaluation.data": sources["task.data"]}
        words = [word for key, path in given.items() for word in (f"--{key}", str(path))]
        code = tlt_here(
            "train", str(workspace / "run.toml"), "--run.out_dir", str(made.out), *words, *WORDS.split()
        )
        assert code in (0, 2)
        assert {path: made.digest().get(path) for path in before} == before, number
        if code == 0:
            num_run += 1
            there = made.digest()
            scatter(made.out, draw, 2, ("policy", "best", "drafter", "adapter", "journal", "responses"))
            before |= {path: text for path, text in made.digest().items() if path not in there}
            tlt_here("train", "--resume", str(made.out), "--run.num_steps", "2")
            assert {path: made.digest().get(path) for path in before} == before, number
        if code == 2:
            assert {*made.digest()} - {*before} <= {os.path.join(made.out.resolve(), ".lock")}, number
    assert num_run >= 1, "the others are refused"

"""Whole runs whose rewards come from the user's functions: over a mixture, and over a file of rows without
any task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tlt.training.report.step_record import read_metrics

FUNCTIONS = """
async def length_penalty(prompts, completions, completion_ids, log_metric, **kwargs):
    log_metric("characters", sum(map(len, completions)) / len(completions))
    return [-len(ids) / 48 for ids in completion_ids]

def has_a_digit(completions, wanted, **kwargs):
    return [None if want is None else float(want in text) for text, want in zip(completions, wanted)]
"""


def train(workspace: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    (workspace / "my_rewards.py").write_text(FUNCTIONS)
    environment = {**os.environ, "PYTHONPATH": str(workspace), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    few = "--run.num_steps 2 --run.num_ranks 1 --rollout.speculation off --drafter.train false"
    run = [f"{workspace}/run.toml", "--run.out_dir", f"{workspace}/{name}"]
    words = ["-m", "tlt", "train", *run, *few.split(), *overrides]
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False, timeout=240
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_mixture_scored_by_its_tasks_and_a_function_says_the_means_of_each(workspace: Path) -> None:
    tasks = '[{name = "digits:TASK", weight = 2, label = "digits"}, {name = "countdown", options = {max_number = 9}}]'
    done = train(
        workspace,
        "mixture",
        *("--task.name", "mixture", "--task.options.tasks", tasks),
        *("--rewards.functions", '["task", "my_rewards:length_penalty"]', "--rewards.weights", "[1.0, 0.5]"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 × task + 0.5 × my_rewards:length_penalty" in done.stdout
    for record in read_metrics(workspace / "mixture" / "metrics.jsonl"):
        rewards, parts = record.rewards, record.rewards.parts
        assert set(parts) == {"task", "length_penalty"}
        assert parts["length_penalty"] == pytest.approx(-record.rollout.response_tokens.mean / 48)
        assert rewards.mean == pytest.approx(parts["task"] + 0.5 * parts["length_penalty"])
        assert rewards.metrics["characters"] > 0
        assert set(rewards.reward_by_task) == set(rewards.solve_rate_by_task) <= {"digits", "countdown"}
    for evaluation in lines(workspace / "mixture" / "evaluations.jsonl"):
        assert set(evaluation["by_task"]) == {"digits", "countdown"}
        assert len([problem for problem in evaluation["by_problem"] if problem.startswith("digits/")]) == 4


def test_rows_of_a_file_need_no_task_where_functions_score_them(workspace: Path) -> None:
    rows = [{"prompt": f"[{i + 1},2:5]", "wanted": None if i == 0 else "2"} for i in range(4)]
    (workspace / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--task.name", "data", "--task.data", str(workspace / "rows.jsonl"))
    done = train(
        workspace,
        "rows",
        *words,
        "--evaluation.num_problems",
        "0",
        "--rewards.functions",
        '["my_rewards:has_a_digit"]',
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rewards in (record.rewards for record in read_metrics(workspace / "rows" / "metrics.jsonl")):
        assert rewards.num_errors == 4, "the group of the row to which the function does not apply"
        assert rewards.first_error == "not applicable: every reward function returned None"
        assert rewards.mean == rewards.parts["has_a_digit"] == rewards.solve_rate

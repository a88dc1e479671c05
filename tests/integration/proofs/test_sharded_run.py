"""Whole runs with a sharded update are the replicated runs: on two ranks and four, and from one number of
ranks to another."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.test_run import PATIENCE, command, records, same_weights, train, what_the_law_fixes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE)]

SHORT = ("--run.num_steps", "3")
MINIBATCHES = ("--algorithm.minibatches", "2", "--algorithm.tokens_per_micro_batch", "128")
UNCLIPPED = (*SHORT, *MINIBATCHES, "--optimizer.clip_grad_norm", "1e9")
SHARDED = ("--parallel.policy", "fsdp")
ONCE = (*SHARDED, "--parallel.reduce_each_micro_batch", "false")
KL = ("--algorithm.kl_coefficient", "0.1")


def but_norms(out_dir: Path) -> list[dict[str, Any]]:
    """What the law fixes but for the norm, which is added up in another order."""
    return [{**record, "update/grad_norm": None} for record in what_the_law_fixes(out_dir)]


def solved(out_dir: Path) -> list[dict[str, Any]]:
    lines = (out_dir / "evaluations.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": None} for line in lines]


def apart(a: Path, b: Path) -> float:
    one, other = (load_file(path / "policy" / "model.safetensors") for path in (a, b))
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_close(ours: Path, theirs: Path, tolerance: float = 1e-12) -> None:
    """The same tokens and rewards, losses and weights but for rounding."""
    for mine, expected in zip(what_the_law_fixes(ours), what_the_law_fixes(theirs), strict=True):
        rounded = {name for name in mine if name.startswith("update/")}
        assert len(rounded) == 3
        assert {name: mine[name] for name in mine.keys() - rounded} == {
            name: expected[name] for name in expected.keys() - rounded
        }
        for name in rounded:
            assert mine[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name
    assert solved(ours) == solved(theirs)
    assert apart(ours, theirs) < tolerance


@pytest.fixture(scope="module")
def replicated(workspace: Path) -> Path:
    return train(workspace, "replicated", *UNCLIPPED, "--parallel.policy", "replicate")


@pytest.fixture(scope="module")
def sharded(workspace: Path) -> Path:
    return train(workspace, "sharded", *UNCLIPPED, *ONCE)


def test_a_sharded_run_is_the_replicated_run_to_the_last_bit(sharded: Path, replicated: Path) -> None:
    assert but_norms(sharded) == but_norms(replicated)
    assert solved(sharded) == solved(replicated)
    assert same_weights(sharded, replicated)
    assert (sharded / "best" / "model.safetensors").read_bytes() == (
        replicated / "best" / "model.safetensors"
    ).read_bytes()
    assert "policy sharded (FSDP2) (parallel.policy is fsdp)" in sharded.with_suffix(".txt").read_text()


def test_four_ranks_take_three_steps_with_a_reference_policy(workspace: Path) -> None:
    four = (*UNCLIPPED, *KL, "--run.num_ranks", "4")
    assert_close(train(workspace, "four", *four, *SHARDED), train(workspace, "four-replicated", *four))


def test_a_run_goes_from_two_ranks_to_one_and_back(workspace: Path, replicated: Path) -> None:
    out_dir = train(workspace, "wandering", *UNCLIPPED, *SHARDED, "--run.num_steps", "1")
    for num_ranks, num_steps in (("1", "2"), ("2", "3")):
        words = ("--resume", str(out_dir), "--run.num_ranks", num_ranks, "--run.num_steps", num_steps)
        words, environment = command(workspace, *words)
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr + done.stdout
    tokens = [(record.rollout.num_tokens, record.rewards.mean) for record in records(out_dir)]
    assert tokens == [(record.rollout.num_tokens, record.rewards.mean) for record in records(replicated)]
    assert apart(out_dir, replicated) < 1e-12

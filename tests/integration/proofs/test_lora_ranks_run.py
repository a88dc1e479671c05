"""Whole runs with LoRA on two ranks: sharded as replicated, from one number of ranks to another, with spot
training."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.test_run import command, records, same_weights, train, what_the_law_fixes
from tlt.models.hf.config import load_model_config
from tlt.models.hf.weights import content_hash, load_tensors

pytestmark = pytest.mark.slow

LORA = (
    "--lora.rank",
    "4",
    "--run.num_steps",
    "3",
    "--optimizer.clip_grad_norm",
    "1e9",
    "--optimizer.learning_rate",
    "3e-2",
)
SHARDED = ("--parallel.policy", "fsdp", "--parallel.reduce_each_micro_batch", "false")
REST = ("--algorithm.kl_coefficient", "0.1", "--algorithm.minibatches", "2")


@pytest.fixture(scope="module")
def replicated(workspace: Path) -> Path:
    return train(workspace, "replicated", *LORA, *REST)


def apart(a: Path, b: Path) -> float:
    one, other = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (a, b))
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_a_sharded_run_is_the_replicated_run_to_the_last_bit(workspace: Path, replicated: Path) -> None:
    sharded = train(workspace, "sharded", *LORA, *REST, *SHARDED)
    one, other = (
        [{**record, "grad_norm": None} for record in what_the_law_fixes(run)] for run in (sharded, replicated)
    )
    assert one == other
    assert apart(sharded, replicated) == 0
    assert same_weights(sharded, replicated)
    said = sharded.with_suffix(".txt").read_text()
    assert "LoRA of rank 4 on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj: " in " ".join(
        said.split()
    )


def test_a_run_goes_from_two_ranks_to_one_and_back(workspace: Path, replicated: Path) -> None:
    out_dir = train(workspace, "wandering", *LORA, *REST, *SHARDED, "--run.num_steps", "1")
    for num_ranks, num_steps in (("1", "2"), ("2", "3")):
        words = ("--resume", str(out_dir), "--run.num_ranks", num_ranks, "--run.num_steps", num_steps)
        words, environment = command(
            workspace, *words, "--parallel.policy", "replicate" if num_ranks == "1" else "fsdp"
        )
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False, timeout=280
        )
        assert done.returncode == 0, done.stderr + done.stdout
    ours, theirs = ([record.rollout.num_tokens for record in records(run)] for run in (out_dir, replicated))
    assert ours == theirs
    assert apart(out_dir, replicated) < 1e-12


def test_the_drafter_is_trained_in_idle_time_beside_the_merged_policy(replicated: Path) -> None:
    assert sum(record.drafter.tokens for record in records(replicated)) > 0
    noted = json.loads((replicated / "drafter" / "config.json").read_text())["tlt"]
    policy = load_tensors(replicated / "policy", load_model_config(replicated / "policy"))
    assert noted["policy_hash"] == content_hash(policy)

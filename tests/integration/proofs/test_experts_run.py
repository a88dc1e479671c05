"""Whole runs of the recipe experts: speculation changes no token and no weight, and two ranks with a sharded update,
the engine's routes replayed, are one rank."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.integration.proofs.test_sharded_run import assert_close
from tests.integration.test_run import PATIENCE, records, same_weights, train, what_the_law_fixes
from tlt.base.io.recipes import copy_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * PATIENCE)]

SMALL = "--run.num_steps 2 --run.num_ranks 2 --run.dtype float64 --sampling.max_tokens 64 --evaluation.num_problems 8"
SMALL += " --task.num_problems 64 --rollout.problems_per_step 4 --rollout.samples_per_problem 4 --optimizer.warmup_steps 0"
SMALL += " --optimizer.clip_grad_norm 1e9 --rollout.speculation 4x1x4"
WORDS = tuple(SMALL.split())
LORA = ("--lora.rank", "4")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work") / "experts"
    copy_recipe("experts", folder)
    (folder / "quickstart.toml").rename(folder / "run.toml")
    return folder


def test_speculation_on_and_off_are_the_same_run(workspace: Path) -> None:
    words = (*WORDS, "--algorithm.minibatches", "2")
    speculating = train(workspace, "speculating", *words)
    plain = train(workspace, "plain", *words, "--rollout.speculation", "off", "--drafter.train", "false")
    assert what_the_law_fixes(plain) == what_the_law_fixes(speculating)
    assert same_weights(plain, speculating)
    for ours, theirs in zip(records(plain), records(speculating), strict=True):
        assert math.isnan(ours.rollout.accept_length)
        assert theirs.rollout.accept_length > 2
        assert ours.update.router_gap == theirs.update.router_gap == 0


@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_two_ranks_with_a_sharded_update_and_replay_are_one_rank(
    workspace: Path, lora: tuple[str, ...]
) -> None:
    name = "lora" if lora else "full"
    alone = train(workspace, f"{name}-alone", *WORDS, *lora, "--run.num_ranks", "1")
    both = ("--parallel.policy", "fsdp", "--rollout.router_replay", "true")
    sharded = train(workspace, f"{name}-sharded", *WORDS, *lora, *both)
    assert_close(sharded, alone, 1e-8)  # transformers' routers round to float32
    assert any(record.update.grad_norm > 0 for record in records(sharded))
    assert all(record.update.router_gap == 0 for record in records(sharded))

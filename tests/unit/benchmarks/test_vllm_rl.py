"""Runs of two engines, compared from what they left behind; without vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.vllm_rl import compare_arms, describe, following, read_responses
from tests.lossless.helpers import CONFIG, VOCAB, make_policy
from tlt.hf.weights import save_model
from tlt.rollout.dynamic import Group
from tlt.rollout.result import PhaseResult
from tlt.types import Reward, Rollout


def response(index: int, token_ids: tuple[int, ...]) -> Rollout:
    return Rollout("p", index, (1, 2), token_ids, (-1.0,) * len(token_ids), "length", 0)


def write_arm(folder: Path, steps: dict[int, list[Rollout]], policy: str = "same") -> Path:
    folder.mkdir()
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "recalled": 0,
            "policy": policy,
            "rollout": vars(one),
            "reward": vars(Reward(1.0, True)),
        }
        for step, rollouts in steps.items()
        for one in rollouts
    ]
    (folder / "responses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_arms_are_compared_by_their_responses_and_the_weights_they_began_with(tmp_path: Path) -> None:
    steps = {step: [response(index, (3, 4, 5)) for index in range(2)] for step in range(2)}
    one = write_arm(tmp_path / "one", steps)
    same = compare_arms("a and b", one, write_arm(tmp_path / "same", steps))
    assert (same["num_equal"], same["responses"], same["num_tokens"]) == (4, 4, 12)
    assert (same["same_policies"], same["steps"], same["differences"]) == (2, 2, [])

    changed = {**steps, 1: [steps[1][0], response(1, (3, (4 + 7) % VOCAB, 5))]}
    other = write_arm(tmp_path / "other", changed, policy="another")
    tensors = dict(make_policy().state_dict())
    save_model(other / "policy-1", CONFIG, tensors, dtype=torch.float64, source=None)
    found = compare_arms("a and b", one, other)
    assert (found["num_equal"], found["same_policies"]) == (3, 0)
    (difference,) = found["differences"]
    assert (difference["step"], difference["position"], difference["is_near_tie"]) == (1, 1, False)
    assert "0 of 1 that part do so at a near-tie" in describe(found)


def test_an_arm_that_differs_updates_with_the_first_arm_s_responses(tmp_path: Path) -> None:
    one = write_arm(tmp_path / "one", {0: [response(0, (3, 4)), response(1, (5,))]})
    ours = {place[1:]: both for place, both in read_responses(one).items()}
    theirs, rewards = (response(0, (3, 9)), response(1, (5,))), (Reward(0.0, False), Reward(1.0, True))
    draw: Any = SimpleNamespace()
    group = Group(draw, theirs, rewards)
    phase = PhaseResult(list(theirs), list(rewards), [], groups=[group], kept=[group])
    phase = following(phase, ours)
    assert phase.for_update == ([response(0, (3, 4)), response(1, (5,))], [Reward(1.0, True)] * 2)
    assert phase.rollouts == phase.for_update[0]
    assert phase.groups[0] == replace(group, rollouts=tuple(phase.rollouts), rewards=tuple(phase.rewards))

"""Pushes into a vLLM that stands aside: when memory is read, and what decides where responses part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import vllm_push
from benchmarks.side_by_side import Comparison, Difference
from tests.lossless.helpers import CONFIG, make_policy
from tlt.hf.weights import load_tensors
from tlt.types import Rollout

PARTED = 2
"""The push after which vLLM's response is another than our engine's."""


def response(token: int) -> dict[tuple[str, int], Rollout]:
    return {("p", 0): Rollout("p", 0, (1, 2), (3, token), (-1.0, -1.0), "length", 0)}


def test_the_memory_of_all_pushes_is_read_before_a_response_is_judged_by_the_weights_of_its_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    pushed: dict[int, dict[str, torch.Tensor]] = {}

    def judge(requests: Any, ours: Any, theirs: Any, folder: Path) -> Comparison:
        events.append("judged")
        judged = load_tensors(folder, CONFIG)
        assert all(torch.equal(judged[name], tensor.float()) for name, tensor in pushed[PARTED].items())
        return Comparison(1, 0, 2, 0.0, (Difference("p", 0, 1, 4, 5, 1e-5),))

    def answer(engine: Any, requests: Any, lengths: Any) -> dict[tuple[str, int], Rollout]:
        return response(5 if max(pushed) == PARTED else 4)

    def resident_mib() -> float:
        events.append("memory")
        return 1.0

    nothing = SimpleNamespace(load=lambda tensors, version: None)
    vllm = SimpleNamespace(
        load_policy=lambda policy, number: pushed.update({number: policy}), drafter=nothing
    )
    ours = SimpleNamespace(load_policy=lambda policy, number: None)
    model = SimpleNamespace(tensors=dict(make_policy().state_dict()), config=CONFIG, path=None)
    runner = SimpleNamespace(drafter=SimpleNamespace(propose=None))
    setup: Any = SimpleNamespace(model=model, stored=model, vllm=vllm, ours=ours, runner=runner)
    monkeypatch.setattr(vllm_push, "requests_of", lambda model: [None])
    monkeypatch.setattr(vllm_push, "answers", lambda engine, requests: response(4))
    monkeypatch.setattr(vllm_push, "step_by_step", answer)
    monkeypatch.setattr(vllm_push, "compare", judge)
    monkeypatch.setattr(vllm_push, "resident_mib", resident_mib)

    pushes = vllm_push.push_all(setup, 4)
    assert events == ["memory"] * 4 + ["judged"]
    assert [push["margins"] for push in pushes] == [[], [1e-5], [], []]

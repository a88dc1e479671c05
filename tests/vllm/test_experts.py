"""The recipe experts in vLLM: its tokens are our engine's, drafted by its own drafter, before and after a push."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.side_by_side import answers
from tests.vllm.parts import assert_equal, in_vllm, own_engine, vllm_engine
from tlt.base.io.recipes import find_recipe
from tlt.base.types import Request, SamplingParams
from tlt.engine.build.model import load_model
from tlt.models.hf.weights import save_model

pytestmark = in_vllm

BASE, DRAFTER = (find_recipe("experts").with_name(name) for name in ("base", "drafter"))
PUZZLES = ("[3,5:8]", "[2,9,4:7]", "[1,1:2]", "[6,7,8:21]")


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    engine = vllm_engine(BASE, "4x1x4", DRAFTER)
    yield engine
    engine.close()


def test_tokens_are_our_engine_s_before_and_after_a_push(engine: Any, tmp_path: Any) -> None:
    model, own = load_model(BASE, torch.float32), own_engine(BASE)
    assert model.tokenizer is not None
    params = (SamplingParams(0.0, max_tokens=48), SamplingParams(max_tokens=48, seed=2))
    requests = [
        Request(puzzle, sample, tuple(model.tokenizer.encode_text(puzzle)), params[sample])
        for puzzle in PUZZLES
        for sample in range(2)
    ]
    before = answers(engine, requests)
    assert_equal(requests, own, before, BASE)
    assert engine.stats.accept_length > 1.5
    generator = torch.Generator().manual_seed(0)
    policy = {
        name: tensor * (1 + 0.05 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in model.tensors.items()
    }
    save_model(tmp_path / "other", model.config, policy, dtype=torch.float32, source=BASE)
    engine.load_policy(policy, 1)
    own.load_policy(policy, 1)
    after = answers(engine, requests)
    assert_equal(requests, own, after, tmp_path / "other")
    assert any(after[key].token_ids != before[key].token_ids for key in after)

"""Tiny models of every family that both engines know, in vLLM with something to draft; and a model that
two workers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.refused import refused
from tests.side_by_side import answers, random_lengths, step_by_step
from tests.vllm.parts import (
    DEPTH,
    FAMILIES,
    SIZES,
    assert_equal,
    in_vllm,
    make_checkpoint,
    make_drafter,
    own_engine,
    repeating,
    requests_for,
    vllm_engine,
)
from tlt.base.types import Request, SamplingParams
from tlt.engine.build.model import load_model

pytestmark = in_vllm

REQUESTS = requests_for(SIZES["vocab_size"], 24, 3, (7,))
WINDOW = SIZES["max_position_embeddings"]


def check_pushes(engine: Any, own: Any, folder: Path, name: str) -> None:
    """Weights of another seed, greedy: hardly a token stays."""
    other = make_checkpoint(name, folder / "other", seed=8)
    requests = [Request(f"g{i}", 0, (9 + i, 20), SamplingParams(0.0, max_tokens=8)) for i in range(6)]
    before = answers(engine, requests)
    policy = load_model(other, torch.float32).tensors
    engine.load_policy(policy, 1)
    own.load_policy(policy, 1)
    found = answers(engine, requests)
    assert_equal(requests, own, found, other)
    assert sum(found[key].token_ids == before[key].token_ids for key in found) == 0


@pytest.mark.parametrize(
    ("name", "drafts"), [("llama", "ngram"), ("qwen2-bias", "learned"), ("qwen3-norm", "learned")]
)
def test_a_family_s_tokens_are_ours_before_and_after_a_push(name: str, drafts: str, tmp_path: Path) -> None:
    assert name in FAMILIES
    model = make_checkpoint(name, tmp_path / "model")
    drafter = make_drafter(model, tmp_path / "drafter") if drafts == "learned" else None
    engine, own = vllm_engine(model, f"{drafts}:{DEPTH}x1x{DEPTH}", drafter), own_engine(model)
    try:
        requests = [*REQUESTS, *repeating(4)]
        assert_equal(requests, own, answers(engine, requests), model)
        assert engine.stats.num_drafted_tokens > 0
        end = Request("window", 0, (9,) * (WINDOW - 5), SamplingParams(max_tokens=60, seed=4))
        (found,) = engine.generate([end])
        assert (len(found.token_ids), found.finish_reason) == (5, "length")
        check_pushes(engine, own, tmp_path, name)
    finally:
        engine.link.close()


def test_two_workers_share_a_model_and_its_eagle3_drafter(tmp_path: Path) -> None:
    model = make_checkpoint("llama-tied", tmp_path / "model")
    drafter = make_drafter(model, tmp_path / "drafter", "eagle3")
    engine, own = vllm_engine(model, f"{DEPTH}x1x{DEPTH}", drafter, tensor_parallel=2), own_engine(model)
    try:
        assert_equal(REQUESTS, own, answers(engine, REQUESTS), model)
        assert_equal(REQUESTS, own, step_by_step(engine, REQUESTS, random_lengths(DEPTH, 1)), model)
        assert not engine.link.captures
        assert engine.stats.num_drafted_tokens > 0
        check_pushes(engine, own, tmp_path, "llama-tied")
    finally:
        engine.link.close()


def test_a_cache_that_holds_no_whole_response_is_refused_in_one_line(tmp_path: Path) -> None:
    from tlt.base.config.vllm import VllmSection
    from tlt.engine.build.engine import load_engine
    from tlt.engine.settings import EngineSettings

    model = make_checkpoint("llama", tmp_path / "model")
    section = VllmSection(compile=False)
    settings = EngineSettings(engine="vllm", kv_gib=1e-5, vllm=section, max_batch_size=2)
    with refused(r"^engine: vllm does not start \(.*rollout.kv_gib"):
        load_engine(load_model(model, torch.float32), settings)

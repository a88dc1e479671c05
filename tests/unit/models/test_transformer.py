"""The decoder against Hugging Face's own models: logits, gradients, generation, packed batches, bfloat16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.unit.transformer_parts import (
    CASES,
    EXACT,
    PROMPTS,
    VOCAB,
    generate_greedily,
    our_config,
    packed,
    packed_logits,
    referee,
    referee_logits,
    trainable,
)
from tlt.models.decoder import Transformer, rope_inverse_frequencies


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_both_transformers_give_the_logits_of_hugging_face(case: str, dtype: torch.dtype) -> None:
    model = referee(case, dtype)
    sequence = [i * 37 % VOCAB for i in range(100)]
    expected = referee_logits(model, sequence)
    assert expected.std() > 0.5
    for ours in (trainable(model), packed(model)):
        torch.testing.assert_close(packed_logits(ours, [sequence]), expected, atol=EXACT[dtype], rtol=0)


def test_the_scaled_frequencies_cover_all_three_bands_of_llama3() -> None:
    scaled = rope_inverse_frequencies(our_config(CASES["llama-gqa2-rope3"]))
    unscaled = 500.0 ** -(torch.arange(0, 20, 2, dtype=torch.float64) / 20)
    ratio = scaled / unscaled
    assert (ratio > 1 - 1e-12).any()
    assert (ratio < 0.125 + 1e-12).any()
    assert ((ratio > 0.13) & (ratio < 0.99)).any()


def test_gradients_are_those_of_hugging_face(case: str) -> None:
    model = referee(case, torch.float64)
    ours = trainable(model)
    sequence = torch.tensor(PROMPTS[2])
    F.cross_entropy(referee_logits(model, sequence.tolist())[:-1], sequence[1:]).backward()
    F.cross_entropy(packed_logits(ours, [sequence.tolist()])[:-1], sequence[1:]).backward()
    expected = dict(model.named_parameters())
    assert expected.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            expected[name].grad,
            atol=1e-10,
            rtol=1e-8,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@torch.no_grad()
def test_greedy_decoding_from_the_cache_generates_what_hugging_face_generates(case: str) -> None:
    model = referee(case, torch.float32)
    num_tokens = 24
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert len({token for tokens in expected for token in tokens}) > 8  # no constant loop
    assert generate_greedily(packed(model), PROMPTS, num_tokens) == expected


@torch.no_grad()
def test_a_packed_batch_equals_its_sequences_alone(case: str) -> None:
    model = referee(case, torch.float64)
    for ours in (trainable(model), packed(model)):
        alone = torch.cat([packed_logits(ours, [prompt]) for prompt in PROMPTS])
        torch.testing.assert_close(packed_logits(ours, PROMPTS), alone, atol=1e-11, rtol=0)


@torch.no_grad()
def test_a_changed_token_changes_nothing_before_it_and_nothing_in_other_sequences() -> None:
    ours = packed(referee("qwen3-gqa4", torch.float64))
    changed = (PROMPTS[0], PROMPTS[1], (*PROMPTS[2][:4], 29, *PROMPTS[2][5:]))
    difference = (packed_logits(ours, PROMPTS) - packed_logits(ours, changed)).abs().amax(-1)
    first = len(PROMPTS[0]) + len(PROMPTS[1]) + 4
    assert difference[:first].max() < 1e-11
    assert difference[first:].min() > 1e-3


@torch.no_grad()
def test_in_bfloat16_the_packed_transformer_is_as_close_to_float32_as_hugging_face_is(case: str) -> None:
    exact = referee_logits(referee(case, torch.float32), PROMPTS[2])
    rounded = referee_logits(referee(case, torch.bfloat16), PROMPTS[2]).float()
    ours = packed_logits(packed(referee(case, torch.float32), torch.bfloat16), [PROMPTS[2]])
    assert ours.dtype == torch.bfloat16
    error, allowed = (ours.float() - exact).norm() / exact.norm(), (rounded - exact).norm() / exact.norm()
    assert error < 0.05
    assert error < 1.5 * allowed


def test_initialization_depends_on_the_seed_alone() -> None:
    config = our_config(CASES["qwen2-gqa2"])
    first, again, other = (
        dict(Transformer(config).initialize(seed).named_parameters()) for seed in (1, 1, 2)
    )
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        assert torch.equal(parameter, other[name]) == (parameter.dim() == 1), name

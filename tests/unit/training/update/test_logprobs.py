"""Log-probabilities of responses that share a prompt against those of each alone, by a plain path."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tlt.base.types import Rollout
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig, Transformer
from tlt.training.update.logprobs import response_logprobs
from tlt.training.update.micro_batches import Experience

LLAMA = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 8, max_positions=256, tie_embeddings=True)
TEMPERATURE = 0.8


def make_experiences(seed: int, families: Sequence[tuple[int, Sequence[int]]]) -> list[Experience]:
    """families: for each prompt its length, and those of the responses to it."""
    rng = random.Random(seed)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(61) for _ in range(count))

    prompts = [words(length) for length, _ in families]
    rollouts = [
        Rollout(f"p{p}", s, prompts[p], words(length), (0.0,) * length, "stop", 0)
        for p, (_, lengths) in enumerate(families)
        for s, length in enumerate(lengths)
    ]
    return [Experience(rollout, (), needs_grad=True) for rollout in rollouts]


def plain(model: Transformer, batch: Sequence[Experience]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, each response with a prompt of its own and by torch's own
    functions."""
    attend = PackedCausal(model.config, [r.length for r in batch])
    tokens = [token for r in batch for token in (*r.rollout.prompt_ids, *r.rollout.token_ids[:-1])]
    features_NE = model(torch.tensor(tokens), attend.positions(), attend)
    rows = zip(features_NE.split([r.length for r in batch]), batch, strict=True)
    features = [x[r.num_prompt - 1 :] for x, r in rows]
    distribution = torch.distributions.Categorical(logits=model.logits(torch.cat(features)) / TEMPERATURE)
    targets_T = torch.tensor([token for r in batch for token in r.rollout.token_ids])
    return distribution.log_prob(targets_T), distribution.entropy().detach()


def with_gradients(model: Transformer, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, and the gradients of a weighted sum of the former."""
    model.zero_grad()
    logprobs_T, entropy_T = found
    weight_T = torch.linspace(-1, 2, len(logprobs_T), dtype=logprobs_T.dtype)
    (logprobs_T * weight_T).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logprobs_T.detach(), entropy_T, torch.cat(gradients)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_shared_prompt_changes_no_logprob_and_no_gradient(architecture: Any, checkpoints: bool) -> None:
    config = replace(LLAMA, architecture=architecture)
    model = Transformer(config, checkpoints).double().initialize(0, std=0.15)
    families = [(9, [3, 1, 12, 1]), (1, [1, 1, 4]), (30, [7]), (2, [40, 5, 6]), (5, [1, 1])]
    batch = make_experiences(0, families)
    together = with_gradients(model, response_logprobs(model, batch, TEMPERATURE))
    for ours, theirs in zip(together, with_gradients(model, plain(model, batch)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_responses_come_back_in_the_order_of_the_batch() -> None:
    model = Transformer(LLAMA).double().initialize(0, std=0.15)
    batch = make_experiences(1, [(4, [2, 3]), (6, [4, 1])])
    mixed = [batch[i] for i in (2, 0, 3, 1)]
    logprobs_T, _ = response_logprobs(model, mixed, TEMPERATURE)
    torch.testing.assert_close(logprobs_T, plain(model, mixed)[0], rtol=0, atol=1e-12)


def test_a_prompt_is_read_once() -> None:
    model = Transformer(LLAMA).initialize(0)
    read = []
    model.model.layers[0].register_forward_pre_hook(lambda _, inputs: read.append(len(inputs[1])))
    response_logprobs(model, make_experiences(2, [(20, [3, 5, 1]), (7, [2])]), TEMPERATURE)
    assert read == [20 + 2 + 4 + 0 + 7 + 1]

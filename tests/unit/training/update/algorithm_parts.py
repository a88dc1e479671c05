"""A policy update on given log-probabilities, without a model: for tests that compare the loss and its
gradient with formulas and with other libraries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tlt.base.config.schema import AlgorithmSection, OptimizerSection, SamplingSection
from tlt.base.types import Reward, Rollout, id_of
from tlt.models.decoder import ModelConfig
from tlt.training.update import update
from tlt.training.update.gradients import gradients_of
from tlt.training.update.micro_batches import Experience
from tlt.training.update.update import PolicyTrainer

CONFIG = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 8, max_positions=256, tie_embeddings=True)
MAX_TOKENS = 20


@dataclass(frozen=True)
class Case:
    """Responses in canonical order with their rewards, and log-probabilities of their tokens, flat: under
    the policy that sampled, the one that is trained, and the reference."""

    rollouts: list[Rollout]
    rewards: list[Reward]
    old: Tensor
    new: Tensor
    reference: Tensor
    num_samples: int

    @property
    def lengths(self) -> list[int]:
        return [len(rollout.token_ids) for rollout in self.rollouts]

    @property
    def values(self) -> list[float]:
        return [reward.value for reward in self.rewards]


def make_case(seed: int = 0, num_problems: int = 3, num_samples: int = 4, spread: float = 0.4) -> Case:
    """Ragged responses, some truncated; the second problem's rewards are all equal. `spread` is the
    deviation of log ratios."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rollouts, rewards = [], []
    for p in range(num_problems):
        prompt = tuple(rng.randrange(8, 61) for _ in range(rng.randint(1, 5)))
        for s in range(num_samples):
            tokens = tuple(rng.randrange(8, 61) for _ in range(rng.choice([1, 3, 8, 14, 18, MAX_TOKENS])))
            is_cut = len(tokens) == MAX_TOKENS
            tokens = tokens if is_cut else (*tokens[:-1], 7)
            reason = "length" if is_cut else "stop"
            rollouts.append(Rollout(f"p{p}", s, prompt, tokens, (-1.0,) * len(tokens), reason, 0))
            value = 0.25 if p == 1 else rng.choice([0.0, 0.5, 1.0, 1.0 * s])
            rewards.append(Reward(value, value > 0.5))
    assert any(rollout.finish_reason == "length" for rollout in rollouts)
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    old = -torch.rand(num_tokens, dtype=torch.float64, generator=generator) * 3 - 0.1

    def moved(by: float) -> Tensor:
        return old + by * torch.randn(num_tokens, dtype=torch.float64, generator=generator)

    return Case(rollouts, rewards, old, moved(spread), moved(0.5), num_samples)


class Table(torch.nn.Module):
    """Stands in for a model: its parameters are the log-probabilities."""

    def __init__(self, case: Case, values: Tensor) -> None:
        super().__init__()
        self.config = CONFIG
        self.logprobs = torch.nn.Parameter(values.clone())
        starts = torch.tensor([0, *case.lengths]).cumsum(0).tolist()
        self.places = {id_of(r): slice(starts[i], starts[i + 1]) for i, r in enumerate(case.rollouts)}

    def lookup(
        self, batch: Sequence[Experience], temperature: float, routes: None = None, rows: None = None
    ) -> tuple[Tensor, Tensor]:
        found = torch.cat([self.logprobs[self.places[id_of(response.rollout)]] for response in batch])
        return found, torch.zeros_like(found)


def update_by_table(case: Case, tokens_per_micro_batch: int = 64, **algorithm: Any) -> tuple[float, Tensor]:
    """The loss of our update and its gradient by the log-probabilities at `new`, where `old` sampled.

    Two passes: the first is at `old`, as after sampling; instead of the optimizer's step the policy
    becomes `new`.
    """
    settings = AlgorithmSection(epochs=2, tokens_per_micro_batch=tokens_per_micro_batch, **algorithm)
    model: Any = Table(case, case.old)
    reference: Any = Table(case, case.reference) if settings.kl_coefficient else None
    sampling, gradients = SamplingSection(max_tokens=MAX_TOKENS), gradients_of(model, None)
    trainer = PolicyTrainer(model, settings, OptimizerSection(), sampling, 9, gradients, reference)
    passes = []

    def take_down(loss: float, step: int, largest_reward: float) -> float:
        passes.append((loss, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))
        with torch.no_grad():
            model.logprobs.copy_(case.new)
        return 0.0

    with (
        patch.object(update, "response_logprobs", Table.lookup),
        patch.object(trainer, "_optimizer_step", take_down),
    ):
        trainer.update(case.rollouts, case.rewards, 0)
    return passes[1]


def with_rewards(case: Case, values: Sequence[float]) -> Case:
    return replace(case, rewards=[Reward(value, value > 0.5) for value in values])

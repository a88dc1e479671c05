"""From rollouts and rewards to responses with an advantage per token.

rewards ─ minus overlong penalty ─ minus β KL, if it is in the reward ─▶ returns ─▶ advantages
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from tlt.base.config.algorithm import Algorithm, AlgorithmSection
from tlt.base.types import Reward, Rollout, id_of
from tlt.training.update.algorithms import (
    group_advantages,
    overlong_penalty,
    rewards_to_go,
    whitened_advantages,
)
from tlt.training.update.micro_batches import Experience


def check_batch(
    rollouts: Sequence[Rollout], rewards: Sequence[Reward], num_minibatches: int, where: str
) -> None:
    """Raises ValueError, beginning with `where`."""
    if not rollouts:
        raise ValueError(f"{where}: the batch is empty; every step needs at least one response")
    if len(rewards) != len(rollouts):
        raise ValueError(
            f"{where}: {len(rollouts)} rollouts but {len(rewards)} rewards; give one reward per rollout"
        )
    if len(rollouts) < num_minibatches:
        raise ValueError(
            f"{where}: {len(rollouts)} responses cannot fill algorithm.minibatches = {num_minibatches}; "
            "lower it"
        )
    twice = next((which for which, times in Counter(map(id_of, rollouts)).items() if times > 1), None)
    if twice is not None:
        raise ValueError(
            f"{where}: response {twice} occurs twice; each (problem id, sample index) must be there once"
        )
    for rollout, reward in zip(rollouts, rewards, strict=True):
        place = f"{where}: response {id_of(rollout)}"
        if not rollout.prompt_ids or not rollout.token_ids:
            raise ValueError(f"{place} is empty; prompt and response need at least one token each")
        if len(rollout.logprobs) != len(rollout.token_ids):
            raise ValueError(
                f"{place} has {len(rollout.token_ids)} tokens but {len(rollout.logprobs)} logprobs"
            )
        if not math.isfinite(reward.value):
            raise ValueError(f"{place} has reward {reward.value}; rewards must be finite")


def count_problems(rollouts: Sequence[Rollout]) -> int:
    return len({rollout.problem_id for rollout in rollouts})


def scored_ones(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> tuple[list[Rollout], list[Reward]]:
    scored = [pair for pair in zip(rollouts, rewards, strict=True) if pair[1].is_scored]
    return [rollout for rollout, _ in scored], [reward for _, reward in scored]


def make_experiences(
    rollouts: Sequence[Rollout],
    rewards: Sequence[Reward],
    section: AlgorithmSection,
    algorithm: Algorithm,
    kl: Sequence[Tensor] | None,
) -> tuple[list[Experience], int]:
    """(responses with their advantages, in the same order; number of problems whose advantages are all 0).

    rollouts, rewards: in canonical order, all scored.
    kl: by response and token, float64; None: the KL is not in the reward.
    """
    if not rollouts:
        return [], 0
    penalties = None if kl is None else [section.kl_coefficient * kl_T for kl_T in kl]
    values = []
    for rollout, reward in zip(rollouts, rewards, strict=True):
        num_tokens = len(rollout.token_ids)
        excess = overlong_penalty(num_tokens, algorithm.max_tokens, algorithm.overlong_buffer_tokens)
        values.append(reward.value - section.overlong_penalty * excess)
    make = _whitened if algorithm.advantage == "batch-whitened" else _grouped
    advantages = make(rollouts, values, algorithm, penalties)
    has_kl_loss = section.kl_coefficient > 0 and algorithm.kl_in == "loss"
    experiences, with_advantage = [], set()
    for rollout, of_tokens in zip(rollouts, advantages, strict=True):
        if section.mask_truncated and rollout.finish_reason != "stop":
            masked = (0.0,) * len(of_tokens)
            experiences.append(Experience(rollout, masked, needs_grad=False, is_masked=True))
        else:
            experiences.append(Experience(rollout, of_tokens, needs_grad=has_kl_loss or any(of_tokens)))
        if any(of_tokens):
            with_advantage.add(rollout.problem_id)
    return experiences, count_problems(rollouts) - len(with_advantage)


def _grouped(
    rollouts: Sequence[Rollout],
    values: Sequence[float],
    algorithm: Algorithm,
    penalties: Sequence[Tensor] | None,
) -> list[tuple[float, ...]]:
    if penalties is not None:
        values = [value - float(kl_T.sum()) for value, kl_T in zip(values, penalties, strict=True)]
    ids = [rollout.problem_id for rollout in rollouts]
    group_of = {problem_id: i for i, problem_id in enumerate(dict.fromkeys(ids))}
    group_R = torch.tensor([group_of[problem_id] for problem_id in ids])
    advantages_R = group_advantages(torch.tensor(values, dtype=torch.float64), group_R, algorithm.advantage)
    return [(a,) * len(r.drawn) for r, a in zip(rollouts, advantages_R.tolist(), strict=True)]


def _whitened(
    rollouts: Sequence[Rollout],
    values: Sequence[float],
    algorithm: Algorithm,
    penalties: Sequence[Tensor] | None,
) -> list[tuple[float, ...]]:
    penalties = penalties or [torch.zeros(len(r.drawn), dtype=torch.float64) for r in rollouts]
    returns = [rewards_to_go(value, kl_T) for value, kl_T in zip(values, penalties, strict=True)]
    return [tuple(advantages_T.tolist()) for advantages_T in whitened_advantages(returns)]

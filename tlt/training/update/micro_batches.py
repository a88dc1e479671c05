"""The plan of a policy update: which rank computes which responses, in which micro-batches.

    responses ─ sample_zero_advantage ─▶ fewer ─ plan_ranks ─▶ rank 0 ─ pack_families ─▶ [micro-batch] …
                                                               rank 1                    [micro-batch] …

Responses to one prompt are a family: a micro-batch computes their prompt once. Every rank computes the same
plan.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.base.types import Rollout
from tlt.models.decoder import ModelConfig


@dataclass(frozen=True)
class Experience:
    rollout: Rollout
    advantages: tuple[float, ...]
    """One for each token of the policy's own (`Rollout.drawn`)."""
    needs_grad: bool
    metric_weight: float = 1.0
    """Responses that it stands for in the metrics; 0: another one stands for it."""
    is_masked: bool = False

    @property
    def num_tokens(self) -> int:
        """The policy's own; an environment's are read, but not learned."""
        return len(self.rollout.drawn)

    @property
    def num_in_loss(self) -> int:
        return 0 if self.is_masked else self.num_tokens

    @property
    def length(self) -> int:
        """Tokens that the model reads."""
        return self.num_prompt + self.num_own

    @property
    def num_prompt(self) -> int:
        return len(self.rollout.prompt_ids)

    @property
    def num_own(self) -> int:
        """Response tokens that the model reads: all but the last."""
        return len(self.rollout.token_ids) - 1


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """All responses with or all without a backward pass; compared by identity. A dummy only keeps step with
    other ranks: its loss is 0."""

    responses: tuple[Experience, ...]
    is_dummy: bool = False

    @property
    def needs_grad(self) -> bool:
        return self.responses[0].needs_grad


def sample_zero_advantage(responses: Sequence[Experience], num_tokens: int) -> list[Experience]:
    """About `num_tokens` tokens stand for all responses without a gradient; metric weights keep the sums
    unbiased."""
    without = [i for i, r in enumerate(responses) if not r.needs_grad]
    num_without = sum(responses[i].num_tokens for i in without)
    if num_without <= num_tokens:
        return list(responses)
    count = math.ceil(len(without) * num_tokens / num_without)
    # seeded by the tokens: the update is pure
    sampled = set(random.Random(num_without).sample(without, count))
    weights = {i: len(without) / count if i in sampled else 0.0 for i in without}
    return [dataclasses.replace(r, metric_weight=weights.get(i, 1.0)) for i, r in enumerate(responses)]


MIN_PROMPT = 1 / 16
"""Least ratio of prompt to response tokens at which sharing a prompt saves time (benchmarks/log.md)."""


def families_of(responses: Sequence[Experience]) -> list[list[int]]:
    """Indices by prompt; a response whose prompt is too short to share is a family."""
    families: dict[object, list[int]] = {}
    for i, r in enumerate(responses):
        shares = r.num_prompt >= MIN_PROMPT * r.num_own
        families.setdefault((r.rollout.prompt_ids, r.needs_grad) if shares else i, []).append(i)
    return list(families.values())


def sequence_cost(length: int, config: ModelConfig) -> float:
    """In tokens of matrix products: T + T² · (cost of attending to one token / cost of one token's
    projections). Attention counts its full square: a CPU's causal half runs at half the speed."""
    c = config
    projections = c.hidden_size * (c.head_dim * (c.num_qkv + c.num_heads) + 3 * c.intermediate_size)
    return length + length**2 * (7 / 3 * c.num_heads * c.head_dim) / projections


def plan_ranks(
    families: Sequence[Sequence[int]], own: Sequence[float], num_ranks: int, prompts: Sequence[float]
) -> Shares:
    """Chooses whole families, or halves, quarters and so on of all families, by the smallest largest load.

    own: cost of each item without its prompt.
    prompts: cost of each family's prompt, on every rank with some of the family.
    """
    plans = []
    num_parts = 1
    while num_parts < 2 * max(map(len, families), default=1):
        plans.append(_deal(families, own, num_ranks, prompts, num_parts))
        num_parts *= 2
    return min(plans, key=lambda plan: plan[0])[1]


Shares = list[dict[int, list[int]]]
"""Indices of responses, by rank and then by family."""


def _deal(
    families: Sequence[Sequence[int]],
    own: Sequence[float],
    num_ranks: int,
    prompts: Sequence[float],
    num_parts: int,
) -> tuple[float, Shares]:
    """Greedy. Returns (largest load, items by rank)."""
    parts = []
    for number, family in enumerate(families):
        falling = sorted(family, key=lambda i: (-own[i], i))
        parts += [(number, falling[start::num_parts]) for start in range(min(num_parts, len(family)))]
    costs = [prompts[number] + sum(own[i] for i in part) for number, part in parts]
    loads = [0.0] * num_ranks
    shares: Shares = [{} for _ in range(num_ranks)]
    for p in sorted(range(len(parts)), key=lambda p: (-costs[p], parts[p][1])):
        number, part = parts[p]
        after = [
            load + costs[p] - (prompts[number] if number in share else 0)
            for load, share in zip(loads, shares, strict=True)
        ]
        rank = after.index(min(after))
        shares[rank].setdefault(number, []).extend(part)
        loads[rank] = after[rank]
    return max(loads), shares


def plan_micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: at most `budget` tokens, or one longer sequence."""
    room: list[int] = []
    batches: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        batch = next((b for b, free in enumerate(room) if lengths[item] <= free), len(batches))
        if batch == len(batches):
            batches.append([])
            room.append(budget)
        batches[batch].append(item)
        room[batch] -= lengths[item]
    return batches


def plan_shares(
    responses: Sequence[Experience], config: ModelConfig, budget: int, num_ranks: int
) -> list[list[MicroBatch]]:
    """Those with a gradient come first. A hybrid's micro-batch is one response."""
    budget = 1 if config.is_hybrid else budget
    responses = [r for r in responses if r.metric_weight]
    families = families_of(responses)
    prompts = [responses[family[0]].num_prompt * _passes(responses[family[0]]) for family in families]
    own = [(sequence_cost(r.length, config) - r.num_prompt) * _passes(r) for r in responses]
    shares: list[list[MicroBatch]] = []
    for share in plan_ranks(families, own, num_ranks, prompts):
        mine = [[responses[i] for i in sorted(items)] for _, items in sorted(share.items())]
        kinds = [
            [family for family in mine if family[0].needs_grad == needs_grad] for needs_grad in (True, False)
        ]
        shares.append([batch for same in kinds for batch in pack_families(same, budget)])
    return shares


def _passes(response: Experience) -> float:
    return 1 if response.needs_grad else 1 / 3


def pack_families(families: Sequence[Sequence[Experience]], budget: int) -> list[MicroBatch]:
    parts = []
    for family in families:
        room = budget - family[0].num_prompt
        parts += [[family[i] for i in part] for part in plan_micro_batches([r.num_own for r in family], room)]
    lengths = [part[0].num_prompt + sum(r.num_own for r in part) for part in parts]
    return [
        MicroBatch(tuple(r for p in batch for r in parts[p])) for batch in plan_micro_batches(lengths, budget)
    ]


def plan_share(
    responses: Sequence[Experience],
    config: ModelConfig,
    budget: int,
    num_ranks: int,
    rank: int,
    fills_up: bool = False,
) -> list[MicroBatch]:
    """fills_up: adds dummies, so that all ranks have equally many with and without a backward pass."""
    shares = plan_shares(responses, config, budget, num_ranks)
    if not fills_up:
        return shares[rank]
    filled: list[MicroBatch] = []
    for needs_grad in (True, False):
        of_ranks = [[batch for batch in share if batch.needs_grad == needs_grad] for share in shares]
        num_missing = max(map(len, of_ranks)) - len(of_ranks[rank])
        filled += [*of_ranks[rank], *(dummy_batch(needs_grad) for _ in range(num_missing))]
    return filled


def dummy_batch(needs_grad: bool) -> MicroBatch:
    rollout = Rollout("", 0, (0,), (0, 0), (0.0, 0.0), "stop", 0)
    return MicroBatch((Experience(rollout, (0.0, 0.0), needs_grad, is_masked=True),), is_dummy=True)

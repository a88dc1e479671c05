"""Who computes what in a policy update, from the lengths of the responses alone. Knows no tensors and no clock.

    responses ─ sample_flat ─▶ weighted ─ plan_ranks ─▶ rank 0: responses ─ plan_micro_batches ─▶ [micro-batch] [micro-batch]
                                                        rank 1: responses                         [micro-batch]

Every rank plans for all, and comes to the same plan. Where a forward of one rank waits for the others' (a sharded model), ranks
with fewer micro-batches get dummies.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.models.decoder import ModelConfig
from tlt.types import Rollout


@dataclass(frozen=True)
class Response:
    """A rollout as the update sees it: with the advantage of each of its tokens, and whether it needs a backward pass. In the
    means of the metrics it stands for `weight` responses like itself (0: another one stands for it).

    is_masked: it is left out of the loss.
    """

    rollout: Rollout
    advantages: tuple[float, ...]
    needs_grad: bool
    weight: float = 1.0
    is_masked: bool = False

    @property
    def num_tokens(self) -> int:
        """Counts the tokens of the response."""
        return len(self.rollout.token_ids)

    @property
    def num_in_loss(self) -> int:
        """Counts its tokens in the loss."""
        return 0 if self.is_masked else self.num_tokens

    @property
    def length(self) -> int:
        """Counts the tokens that the model reads; the last one is only predicted."""
        return len(self.rollout.prompt_ids) + len(self.rollout.token_ids) - 1


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The responses of one forward, all with or all without a backward pass. Compared by identity, so that it can be a key."""

    responses: tuple[Response, ...]

    @property
    def needs_grad(self) -> bool:
        return self.responses[0].needs_grad

    @property
    def is_dummy(self) -> bool:
        """Whether it stands for nothing: it is computed to keep step with other ranks, its loss is 0 and it counts nowhere."""
        return self.responses[0].weight == 0


def sample_flat(responses: Sequence[Response], num_tokens: int) -> list[Response]:
    """Returns the same responses with weights: of those without a gradient, a sample of about `num_tokens` tokens stands for
    all, so that sums stay unbiased."""
    flat = [i for i, r in enumerate(responses) if not r.needs_grad]
    num_flat = sum(responses[i].num_tokens for i in flat)
    if num_flat <= num_tokens:
        return list(responses)
    count = math.ceil(len(flat) * num_tokens / num_flat)
    sampled = set(random.Random(num_flat).sample(flat, count))  # a function of the tokens, like all of the update
    weights = {i: len(flat) / count if i in sampled else 0.0 for i in flat}
    return [dataclasses.replace(r, weight=weights.get(i, 1.0)) for i, r in enumerate(responses)]


def sequence_cost(length: int, config: ModelConfig) -> float:
    """Estimates the work of one sequence, in tokens of matrix products: T + T² · (cost of attending to one token / that of one
    token's projections). Attention counts its full square: measured on a CPU, SDPA's causal half runs at half the speed of a
    matrix product."""
    c = config
    projections = c.hidden_size * (c.head_dim * (c.num_qkv + c.num_heads) + 3 * c.intermediate_size)
    return length + length**2 * (7 / 3 * c.num_heads * c.head_dim) / projections


def plan_ranks(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Returns each rank's items: the costliest go first, each to the rank with the least so far. Ties go to the earlier item
    and the lower rank."""
    loads = [0.0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(item)
        loads[rank] += costs[item]
    return shares


def plan_micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Packs sequences by first-fit decreasing: a micro-batch holds at most `budget` tokens, or one sequence that is longer."""
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


def plan_shares(responses: Sequence[Response], config: ModelConfig, budget: int, num_ranks: int) -> list[list[MicroBatch]]:
    """Returns the micro-batches of every rank, those that need a gradient first. The others lie in none of these: a forward
    pass alone costs a third. Responses without weight are left out."""
    responses = [r for r in responses if r.weight]
    costs = [sequence_cost(r.length, config) * (1 if r.needs_grad else 1 / 3) for r in responses]
    shares: list[list[MicroBatch]] = []
    for items in plan_ranks(costs, num_ranks):
        mine = [responses[i] for i in sorted(items)]
        kinds = [r for r in mine if r.needs_grad], [r for r in mine if not r.needs_grad]
        batches = [(same, batch) for same in kinds for batch in plan_micro_batches([r.length for r in same], budget)]
        shares.append([MicroBatch(tuple(same[i] for i in batch)) for same, batch in batches])
    return shares


def plan_share(responses: Sequence[Response], config: ModelConfig, budget: int, num_ranks: int, rank: int) -> list[MicroBatch]:
    """Returns the micro-batches of one rank."""
    return plan_shares(responses, config, budget, num_ranks)[rank]


def plan_equal_share(
    responses: Sequence[Response], config: ModelConfig, budget: int, num_ranks: int, rank: int
) -> list[MicroBatch]:
    """Returns the micro-batches of one rank, filled up with dummies: every rank has as many with a backward pass, and then as
    many without."""
    shares = plan_shares(responses, config, budget, num_ranks)
    filled: list[MicroBatch] = []
    for needs_grad in (True, False):
        of_ranks = [[batch for batch in share if batch.needs_grad == needs_grad] for share in shares]
        num_missing = max(map(len, of_ranks)) - len(of_ranks[rank])
        filled += [*of_ranks[rank], *(dummy_batch(needs_grad) for _ in range(num_missing))]
    return filled


def dummy_batch(needs_grad: bool) -> MicroBatch:
    """Returns a micro-batch of two tokens that changes nothing."""
    rollout = Rollout("", 0, (0,), (0, 0), (0.0, 0.0), "stop", 0)
    return MicroBatch((Response(rollout, (0.0, 0.0), needs_grad, weight=0.0, is_masked=True),))

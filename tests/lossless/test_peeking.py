"""A batch may choose by the drafted tokens themselves how much of each draft it verifies.

Under rejection sampling (Leviathan et al., arXiv 2211.17192) that changes what is sampled: whether a token is
verified must not depend on it (DSpark, arXiv 2607.05147, appendix A). Under our law the target draws its own
token with noise that the choice cannot move.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tlt.base.types import SamplingParams
from tlt.speculation.law.params import BatchParams, Law
from tlt.speculation.law.sampling import gumbel_noise
from tlt.speculation.law.tree import chain
from tlt.speculation.law.verify import verify

TARGET = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
DRAFTER = torch.tensor([0.4, 0.1, 0.5], dtype=torch.float64)
NUM = 40_000
WRONG = math.sqrt(0.5 * math.log(2 / 1e-9) / NUM)
"""The distance from a share of NUM draws beyond which a test errs once in 10⁹ (Hoeffding)."""


def drafts(noise_BV: Tensor) -> Tensor:
    """Returns a drafted token for each row, drawn from DRAFTER with the target's own noise."""
    return (DRAFTER.log() + noise_BV).argmax(-1)


def is_verified(drafted_B: Tensor) -> Tensor:
    """Returns the choice that peeks: the drafter is surest of token 0, so its drafts are verified."""
    return drafted_B == 0


KEYS_B4 = torch.tensor([[0, 0, 0, row] for row in range(NUM)])


def noise_of(position: int) -> Tensor:
    return gumbel_noise(KEYS_B4, torch.full((NUM, 1), position), len(TARGET))[:, 0].double()


def law_of(num_nodes: int) -> Law:
    """At positions 1, 2, … of every row."""
    positions_R = torch.arange(1, 1 + num_nodes).repeat(NUM)
    params = BatchParams.of([SamplingParams()] * len(positions_R))
    return Law(KEYS_B4.repeat_interleave(num_nodes, dim=0), positions_R, params)


def shares(tokens_B: Tensor) -> Tensor:
    return torch.bincount(tokens_B, minlength=len(TARGET)) / len(tokens_B)


def reject(drafted_B: Tensor, verified_B: Tensor) -> Tensor:
    """Returns the tokens that rejection sampling commits: of a verified draft it or the residual's draw, else
    the target's."""
    rng = torch.Generator().manual_seed(0)
    uniform_B = torch.rand(NUM, generator=rng, dtype=torch.float64)
    residual_V = (TARGET - DRAFTER).clamp_min(0.0)
    from_residual_B = torch.multinomial(residual_V, NUM, replacement=True, generator=rng)
    from_target_B = torch.multinomial(TARGET, NUM, replacement=True, generator=rng)
    is_kept_B = uniform_B < (TARGET / DRAFTER)[drafted_B]
    return torch.where(verified_B, torch.where(is_kept_B, drafted_B, from_residual_B), from_target_B)


def test_rejection_sampling_is_wrong_where_the_drafted_tokens_decide_what_is_verified() -> None:
    drafted_B = drafts(noise_of(1))
    always = torch.ones(NUM, dtype=torch.bool)
    assert (shares(reject(drafted_B, always)) - TARGET).abs().max() < WRONG, "it is right where all are"
    biased = shares(reject(drafted_B, is_verified(drafted_B)))
    expected = DRAFTER[0] + (1 - DRAFTER[0]) * TARGET[0]
    assert abs(float(biased[0] - expected)) < WRONG
    assert float(biased[0] - TARGET[0]) > 10 * WRONG


def test_the_law_draws_the_same_tokens_whatever_the_drafted_tokens_decide() -> None:
    """Each row verifies its draft of two tokens, one of them or none, by what was drafted."""
    first, second = noise_of(1), noise_of(2)
    drafted_B2 = torch.stack([drafts(first), drafts(second)], 1)
    lengths_B = 1 + is_verified(drafted_B2[:, 0]).long() * (1 + is_verified(drafted_B2[:, 1]).long())
    tokens_B3 = torch.cat([torch.zeros(NUM, 1, dtype=torch.int64), drafted_B2], 1)
    logits_B3V = TARGET.log().expand(NUM, 3, -1)
    peeking = verify(chain(tokens_B3, lengths_B.tolist()), logits_B3V, law_of(3))
    plain = verify(chain(tokens_B3[:, :1]), logits_B3V[:, :1], law_of(1))
    committed = torch.tensor([verdict.tokens[0] for verdict in peeking])
    assert committed.tolist() == [verdict.tokens[0] for verdict in plain]
    assert (shares(committed) - TARGET).abs().max() < WRONG
    second_of = {row: verdict.tokens[1] for row, verdict in enumerate(peeking) if len(verdict.tokens) > 1}
    own_B = (TARGET.log() + second).argmax(-1).tolist()
    assert len(second_of) > NUM // 10
    assert all(token == own_B[row] for row, token in second_of.items())

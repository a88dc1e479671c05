"""The bets: distributions q_t, functions of the prefix alone, staked against the target's p_t.

Axes: see verdict.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TILTS = (0.5, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 2.0)
"""q ∝ p^λ: the engine's temperature is off by the factor 1 / λ."""
ODDS = (0.5, 0.8, 1.25, 2.0)
"""q ∝ p · c^[y in A]: the odds of a set of tokens A are multiplied by c."""
EVENTS = ("stop", "argmax", "match")
"""A: the stop tokens; the likeliest token; the n-gram match (see SOURCES)."""
SHARES = (0.001, 0.01, 0.1)
"""q = (1 − ε) p + ε r: the share ε of the tokens comes from another source r."""
SOURCES = ("flattened", "uniform", "n-gram model", "previous token", "match")
"""r: p at twice its temperature; uniform; a model learned online from the responses judged before; the last
token; the token that followed the last tokens at their latest occurrence in the context (n-gram drafting)."""

BETS = (
    *(f"temperature {1 / tilt:.3g} times" for tilt in TILTS),
    *(f"odds of {event} {odds:g} times" for event in EVENTS for odds in ODDS),
    *(f"{share:g} from {source}" for source in SOURCES for share in SHARES),
)


class OnlineNgrams:
    """P(token | up to three tokens before it), learned from the tokens judged so far. The next lower order
    smooths each, the uniform distribution the lowest."""

    ORDERS = 3
    STRENGTH = 2.0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.counts: dict[tuple[int, ...], dict[int, int]] = {}
        self.totals: dict[tuple[int, ...], int] = {}

    def probabilities(self, prefix: Sequence[int], tokens: Sequence[int]) -> list[float]:
        found = [1.0 / self.vocab_size] * len(tokens)
        for context in self._contexts(prefix):
            counts = self.counts.get(context)
            if counts is None:
                break
            scale = 1.0 / (self.totals[context] + self.STRENGTH)
            found = [
                (counts.get(t, 0) + self.STRENGTH * p) * scale for t, p in zip(tokens, found, strict=True)
            ]
        return found

    def learn(self, prefix: Sequence[int], token: int) -> None:
        for context in self._contexts(prefix):
            counts = self.counts.setdefault(context, {})
            counts[token] = counts.get(token, 0) + 1
            self.totals[context] = self.totals.get(context, 0) + 1

    def _contexts(self, prefix: Sequence[int]) -> list[tuple[int, ...]]:
        last = tuple(prefix[-self.ORDERS :])
        return [last[len(last) - order :] for order in range(len(last) + 1)]


def suffix_matches(prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """The token after the latest occurrence of the last 4, else 3, else 2 tokens in the context; -1: none."""
    tokens = [*prompt_ids, *token_ids]
    followers: dict[tuple[int, ...], int] = {}
    found = []
    for position in range(1, len(tokens)):
        suffixes = [tuple(tokens[position - n : position]) for n in (4, 3, 2) if n <= position]
        if position >= len(prompt_ids):
            found.append(next((followers[suffix] for suffix in suffixes if suffix in followers), -1))
        for suffix in suffixes:
            followers[suffix] = tokens[position]
    return found


def growth(
    logp_TV: Tensor, tokens_ST: Tensor, sources_RST: Tensor, events_TV: Sequence[Tensor], tolerance: float
) -> Tensor:
    """log q(y) / p(y) of every bet, less the price of the tolerance, [K, S, T] in the order of BETS.

    tokens_ST: the tokens y. Growth is 0 where p(y) = 0.
    sources_RST: r(y) of each of SOURCES.
    events_TV: the sets of EVENTS as masks.
    """
    p_TV = logp_TV.exp()
    logp_ST = logp_TV.gather(-1, tokens_ST.T).T
    is_bet_ST = logp_ST > -math.inf
    logp_ST = logp_ST.masked_fill(~is_bet_ST, 0.0)
    excess = 2.0 * math.expm1(tolerance)
    rows: list[Tensor] = []
    for tilt in TILTS:
        tilted_TV = logp_TV * tilt
        norm_T = tilted_TV.logsumexp(-1)
        distance_T = ((tilted_TV - norm_T[:, None]).exp() - p_TV).abs().sum(-1) / 2
        rows.append((tilt - 1) * logp_ST - norm_T - torch.log1p(excess * distance_T))
    for event_TV in events_TV:
        mass_T = (p_TV * event_TV).sum(-1)
        is_in_ST = event_TV.gather(-1, tokens_ST.T).T.double()
        for odds in ODDS:
            norm_T = 1 + (odds - 1) * mass_T
            distance_T = (odds * mass_T / norm_T - mass_T).abs()
            rows.append(is_in_ST * math.log(odds) - norm_T.log() - torch.log1p(excess * distance_T))
    for ratio_ST in sources_RST / logp_ST.exp():
        rows += [torch.log1p(share * (ratio_ST - 1)) - math.log1p(excess * share) for share in SHARES]
    return torch.stack(rows) * is_bet_ST

"""The draft vocabulary: the tokens that a drafter proposes, chosen by frequency.

    responses ─▶ counts, decaying by step ─┐
    prompts of the next step ─▶ counts ────┴▶ the N most frequent tokens ─▶ N rows of the target's head

    N: the size with the fewest seconds per token, estimated from the weights read and the tokens covered

Most weights that a draft reads are the head's, of which a subset of rows needs no training. Other tokens are
still sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlt.base.types import Rollout, UserError
from tlt.base.value_types import DraftVocab
from tlt.drafter.shape import DrafterShape, layer_weights
from tlt.models.decoder import ModelConfig

HEAD_SHARE = 0.1
"""Head's share of the target's weights from which `auto` reduces the vocabulary."""

SMALLEST, LARGEST_SHARE = 1024, 4
"""`auto` tries powers of two up to a quarter of the vocabulary: few sizes, so that compiled kernels are
reused."""

ACCEPTANCE, DEPTH = 0.7, 4
"""Sizes are compared for chains of DEPTH tokens, each accepted with this probability if in the vocabulary."""

PROMPTS = 0.3
"""Weight of the prompts' tokens, relative to the responses' (measured: benchmarks/log.md)."""

KEEP = 0.9
"""Decay per step: about ten steps count."""
_FORGOTTEN = 0.05
"""Counts below it become 0."""
_LATEST = 0.5
"""Weight of the latest step in the running mean of coverage."""

_SOUND_LENGTH = 0.1
"""Least norm of a mask embedding, relative to the median norm."""

RESIZE_ABOVE = 0.03
"""Share of the seconds per token that a new size must save, because it needs new kernels."""


@dataclass(frozen=True)
class DraftCosts:
    """Weights read by a forward of the target, by a drafted token (without the head), and per row of the
    head: proportional to seconds where memory bandwidth limits."""

    forward: int
    layer: int
    row: int
    vocab_size: int

    @staticmethod
    def of(target: ModelConfig, shape: DrafterShape) -> DraftCosts:
        row = target.hidden_size
        forward = target.num_layers * layer_weights(target) + target.vocab_size * row
        layer = shape.weights_per_level + shape.weights_per_draft // DEPTH
        return DraftCosts(forward, layer, row, target.vocab_size)

    @property
    def head_share(self) -> float:
        return self.row * self.vocab_size / self.forward

    def of_draft(self, size: int) -> float:
        return (self.layer + size * self.row) / self.forward

    def of_token(self, size: int, coverage: float) -> float:
        accepted = ACCEPTANCE * coverage
        return (1 + DEPTH * self.of_draft(size)) / sum(accepted**depth for depth in range(DEPTH + 1))


def count_tokens(token_ids: Iterable[int], vocab_size: int) -> Tensor:
    return torch.bincount(torch.tensor([*token_ids], dtype=torch.int64), minlength=vocab_size).float()


def ranked(counts_V: Tensor) -> Tensor:
    """Ties go to the lower id, which tokenizers mostly give to the more frequent token."""
    return counts_V.sort(descending=True, stable=True).indices


def mask_token(counts_V: Tensor, embedding_VE: Tensor) -> int:
    """Returns the least used token, of ties the highest id, which tokenizers mostly leave unused. Embeddings
    near zero or not finite are skipped."""
    length_V = embedding_VE.float().norm(dim=1)
    is_sound_V = length_V.isfinite() & (length_V > _SOUND_LENGTH * length_V.nanmedian())
    counts_V = counts_V.to(length_V.device).masked_fill(~is_sound_V, math.inf)
    return int((counts_V == counts_V.min()).nonzero()[-1])


def sizes_of(costs: DraftCosts, wanted: DraftVocab) -> list[int]:
    """Sizes to choose from; [] for `full` or a small head."""
    if isinstance(wanted, int):
        return [wanted]
    if wanted == "full" or costs.head_share < HEAD_SHARE:
        return []
    powers = (SMALLEST << index for index in range(32))
    return [size for size in powers if size <= costs.vocab_size // LARGEST_SHARE]


class DraftVocabulary:
    """counts_V: earlier counts, or None.
    covered: running mean of each size's share of later tokens; while empty, the largest size serves.
    token_ids: the draft vocabulary, ascending; None: all tokens.
    """

    def __init__(
        self, costs: DraftCosts, wanted: DraftVocab = "auto", counts_V: Tensor | None = None
    ) -> None:
        self.costs, self.sizes = costs, sizes_of(costs, wanted)
        self.counts_V = torch.zeros(costs.vocab_size) if counts_V is None else counts_V.float().clone()
        self.prompts_V = torch.zeros(costs.vocab_size)
        self.covered: list[float] = []
        self.token_ids: Tensor | None = None
        self.num_renewals = 0
        self._ranked_V: Tensor | None = None
        self.renew()

    @property
    def size(self) -> int:
        return self.costs.vocab_size if self.token_ids is None else len(self.token_ids)

    def count(self, token_ids: Iterable[int]) -> Tensor:
        return count_tokens(token_ids, self.costs.vocab_size)

    def count_responses(self, rollouts: Iterable[Rollout]) -> Tensor:
        return self.count(token for rollout in rollouts for token in rollout.token_ids)

    def foresee(self, prompts: Iterable[Sequence[int]]) -> None:
        """The next prompts' tokens often recur in their responses."""
        self.prompts_V = self.count(token for prompt in prompts for token in prompt)

    def observe(self, counts_V: Tensor, keep: float = 1.0) -> None:
        """keep: decay of earlier counts, which are also bounded by the total of as many steps of this
        size.
        """
        total, known = float(counts_V.sum()), float(self.counts_V.sum())
        if total == 0:
            return
        if self._ranked_V is not None and self.sizes:
            shares_V = counts_V[self._ranked_V].double().cumsum(0) / total
            held = shares_V[torch.tensor(self.sizes) - 1].tolist()
            pairs = zip(self.covered or held, held, strict=True)
            self.covered = [before + _LATEST * (now - before) for before, now in pairs]
        if keep < 1 and known:
            self.counts_V *= min(keep, total * keep / (1 - keep) / known)
            self.counts_V[self.counts_V < _FORGOTTEN] = 0.0
        self.counts_V += counts_V

    def renew(self) -> bool:
        shares_V = _shares(self.counts_V) + PROMPTS * _shares(self.prompts_V)
        before, chosen = self.token_ids, None
        if self.sizes and float(shares_V.sum()):
            self._ranked_V = ranked(shares_V)
            if (size := self._best_size()) < self.costs.vocab_size:
                chosen = self._ranked_V[:size].sort().values
        if chosen is before or (chosen is not None and before is not None and torch.equal(chosen, before)):
            return False
        self.token_ids, self.num_renewals = chosen, self.num_renewals + 1
        return True

    def _best_size(self) -> int:
        if len(self.sizes) == 1 or not self.covered:
            return self.sizes[-1]
        costs = {
            size: self.costs.of_token(size, held) for size, held in zip(self.sizes, self.covered, strict=True)
        }
        costs[self.costs.vocab_size] = self.costs.of_token(self.costs.vocab_size, 1.0)
        best = min(costs, key=lambda size: costs[size])
        stays = self.size in costs and costs[best] > (1 - RESIZE_ABOVE) * costs[self.size]
        return self.size if stays else best

    def coverage(self, rollouts: Sequence[Rollout]) -> float:
        if self.token_ids is None:
            return 1.0
        counts_V = self.count_responses(rollouts)
        return float(counts_V[self.token_ids].sum() / counts_V.sum())

    def counters(self) -> dict[str, Any]:
        """JSON without the prompts, which are counted again."""
        chosen = None if self.token_ids is None else self.token_ids.tolist()
        known = {"counts": to_pairs(self.counts_V), "covered": self.covered, "sizes": self.sizes}
        return {**known, "token_ids": chosen, "renewals": self.num_renewals}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """If the sizes to choose from differ now, they apply from the next renewal on."""
        self.counts_V = from_pairs(counters["counts"], self.costs.vocab_size)
        self.covered = list(counters["covered"]) if counters["sizes"] == self.sizes else []
        chosen = counters["token_ids"]
        self.token_ids = None if chosen is None else torch.tensor(chosen)
        self.num_renewals = counters["renewals"]


def choose_by(rollouts: Sequence[Rollout], vocabulary: DraftVocabulary) -> None:
    """The first half of the responses ranks the tokens, the second chooses the size."""
    middle = len(rollouts) // 2
    vocabulary.foresee(rollout.prompt_ids for rollout in rollouts)
    for half in (rollouts[:middle], rollouts[middle:]):
        vocabulary.observe(vocabulary.count_responses(half))
        vocabulary.renew()


def _shares(counts_V: Tensor) -> Tensor:
    return counts_V / counts_V.sum().clamp_min(1e-9)


def check_wanted(wanted: DraftVocab, shape: DrafterShape) -> None:
    """Raises UserError for a size that is too large, or a drafter whose vocabulary is fixed."""
    if not isinstance(wanted, int):
        return
    if wanted >= shape.layer.vocab_size:
        remedy = f"must be less than the model's vocabulary, {shape.layer.vocab_size}; give fewer, or full"
        raise UserError(f"draft vocabulary: {wanted} {remedy}")
    if not shape.can_choose:
        reduced = f"a vocabulary of its own, of {shape.draft_vocab_size} tokens"
        own = "a head of its own" if shape.owns_head else reduced
        raise UserError(
            f"draft vocabulary: {wanted} tokens cannot be chosen, for the drafter has {own}; leave it out"
        )


def to_pairs(counts_V: Tensor) -> list[list[float]]:
    ids = counts_V.nonzero()[:, 0]
    return [ids.tolist(), counts_V[ids].tolist()]


def from_pairs(pairs: Sequence[Sequence[float]], vocab_size: int) -> Tensor:
    counts_V = torch.zeros(vocab_size)
    counts_V[torch.tensor(pairs[0], dtype=torch.int64)] = torch.tensor(pairs[1])
    return counts_V

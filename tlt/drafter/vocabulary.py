"""The draft vocabulary: the tokens that a drafter proposes, chosen from what is sampled and from the prompts
that are answered.

    responses ─▶ counts, older ones fading ─┐
    prompts to be answered ─▶ counts ───────┴▶ the N most frequent tokens ─▶ N rows of the target's current head
                                              N: the fewest seconds a token, by what is read and what N tokens covered

A drafted token reads the head and one decoder layer, a forward all layers and the head: at a vocabulary of
150,000 and half a billion parameters, four drafted tokens read more than a forward does. A drafter that
borrows the target's head is the same drafter with fewer of its rows, so the choice needs no training and
changes no weights. The law decides whatever is drafted: a token outside can be sampled as before, only not
drafted. Knows no ranks and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlt.drafter.model import DrafterShape
from tlt.kinds import DraftVocab
from tlt.models.decoder import ModelConfig
from tlt.types import Rollout, UserError

HEAD_SHARE = 0.1
"""Part of a forward's numbers from which on `auto` reduces the head."""

SMALLEST, LARGEST_SHARE = 1024, 4
"""`auto` chooses powers of two from the first on, up to a quarter of the vocabulary: few sizes, so that
kernels are kept."""

ACCEPTANCE, DEPTH = 0.7, 4
"""The draft that sizes are compared for: a chain of four, each token accepted in 7 of 10 cases if the
vocabulary holds it."""

PROMPTS = 0.3
"""Weight of the prompts' tokens, all together, beside that of all responses' (measured:
benchmarks/log.md)."""

KEEP = 0.9
"""Weight that a step's tokens have left one step later. Ten steps' worth of tokens count, therefore."""
_FORGOTTEN = 0.05
"""Weight below which a token counts as not seen."""
_LATEST = 0.5
"""Weight of the latest step in what sizes have covered so far."""

RESIZE_ABOVE = 0.03
"""Part of the seconds a token that another size must save: it takes new kernels."""


@dataclass(frozen=True)
class DraftCosts:
    """Says how many numbers are read: `forward` by a step of the target, `layer` by a drafted token
    besides the head, `row` by each token that the head ranks. Where memory is what takes time, their
    quotients are those of seconds."""

    forward: int
    layer: int
    row: int
    vocab_size: int

    @staticmethod
    def of(target: ModelConfig, shape: DrafterShape) -> DraftCosts:
        row = target.hidden_size
        forward = target.num_layers * _layer_numbers(target) + target.vocab_size * row
        fuse = (
            shape.fc_size * row * (shape.method == "eagle")
        )  # eagle3 fuses once a step, not once a drafted token
        return DraftCosts(
            forward, _layer_numbers(shape.layer, len(shape.layer_norms)) + fuse, row, target.vocab_size
        )

    @property
    def head_share(self) -> float:
        """The head's part of a forward."""
        return self.row * self.vocab_size / self.forward

    def of_draft(self, size: int) -> float:
        """Returns what a drafted token costs with `size` tokens to rank, as a part of a forward."""
        return (self.layer + size * self.row) / self.forward

    def of_token(self, size: int, coverage: float) -> float:
        """Returns what a token costs, in forwards, when chains are drafted of `size` tokens that hold this
        part of all that is sampled."""
        accepted = ACCEPTANCE * coverage
        return (1 + DEPTH * self.of_draft(size)) / sum(accepted**depth for depth in range(DEPTH + 1))


def _layer_numbers(c: ModelConfig, num_read: int = 1) -> int:
    attention = (
        c.num_qkv * c.head_dim * c.hidden_size * max(num_read, 1) + c.num_heads * c.head_dim * c.hidden_size
    )
    return attention + 3 * c.hidden_size * c.intermediate_size


def count_tokens(token_ids: Iterable[int], vocab_size: int) -> Tensor:
    """Returns how often each token is there, float32[V]."""
    return torch.bincount(torch.tensor([*token_ids], dtype=torch.int64), minlength=vocab_size).float()


def ranked(counts_V: Tensor) -> Tensor:
    """Returns all token ids, the most frequent first; among equals the lower id, which tokenizers mostly
    gave to the more frequent token."""
    return counts_V.sort(descending=True, stable=True).indices


def sizes_of(costs: DraftCosts, wanted: DraftVocab) -> list[int]:
    """Returns the sizes to choose from, less than the whole; none where `full` is wanted or the head is
    small."""
    if isinstance(wanted, int):
        return [wanted]
    if wanted == "full" or costs.head_share < HEAD_SHARE:
        return []
    sizes = [SMALLEST]
    while 2 * sizes[-1] <= costs.vocab_size // LARGEST_SHARE:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[0] <= costs.vocab_size // LARGEST_SHARE else []


class DraftVocabulary:
    """Counts tokens, and chooses by the counts.

    wanted: what the user asks for.
    counts_V: of what was sampled before, as a drafter's folder has them; None: nothing was.
    sizes: those to choose from.
    covered: what each held of later tokens, so far; the largest serves until that is known.
    token_ids: the choice, rising; None: the whole vocabulary.
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

    def foresee(self, prompts: Iterable[Sequence[int]]) -> None:
        """Notes the prompts that are answered next: what they name, their answers name too."""
        self.prompts_V = self.count(token for prompt in prompts for token in prompt)

    def observe(self, counts_V: Tensor, keep: float = 1.0) -> None:
        """Counts what was sampled since the last renewal. keep: weight left of what was counted before,
        which weighs no more than all steps like this one would together."""
        total, known = float(counts_V.sum()), float(self.counts_V.sum())
        if total == 0:
            return
        if self._ranked_V is not None and self.sizes:
            held = (counts_V[self._ranked_V].double().cumsum(0) / total)[
                torch.tensor(self.sizes) - 1
            ].tolist()
            pairs = zip(self.covered or held, held, strict=True)
            self.covered = [before + _LATEST * (now - before) for before, now in pairs]
        if keep < 1 and known:
            self.counts_V *= min(keep, total * keep / (1 - keep) / known)
            self.counts_V[self.counts_V < _FORGOTTEN] = 0.0
        self.counts_V += counts_V

    def renew(self) -> bool:
        """Chooses again, and returns whether the choice is another one."""
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
        """Returns the size with the fewest seconds a token, the whole vocabulary among them; the one now
        unless another saves RESIZE_ABOVE."""
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
        """Returns the part of the responses' tokens that can be drafted."""
        if self.token_ids is None:
            return 1.0
        counts_V = self.count(token for rollout in rollouts for token in rollout.token_ids)
        return float(counts_V[self.token_ids].sum() / counts_V.sum())

    def counters(self) -> dict[str, Any]:
        """Returns counts and choice as JSON; the prompts are foreseen again."""
        chosen = None if self.token_ids is None else self.token_ids.tolist()
        known = {"counts": to_pairs(self.counts_V), "covered": self.covered, "sizes": self.sizes}
        return {**known, "token_ids": chosen, "renewals": self.num_renewals}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Takes up what `counters` returned; another size that is wanted now is had from the next renewal
        on."""
        self.counts_V = from_pairs(counters["counts"], self.costs.vocab_size)
        self.covered = list(counters["covered"]) if counters["sizes"] == self.sizes else []
        chosen = counters["token_ids"]
        self.token_ids = None if chosen is None else torch.tensor(chosen)
        self.num_renewals = counters["renewals"]


def choose_by(rollouts: Sequence[Rollout], vocabulary: DraftVocabulary) -> None:
    """Chooses by responses that are all there: the first half says which tokens, the second how many."""
    middle = len(rollouts) // 2
    vocabulary.foresee(rollout.prompt_ids for rollout in rollouts)
    for half in (rollouts[:middle], rollouts[middle:]):
        vocabulary.observe(vocabulary.count(token for rollout in half for token in rollout.token_ids))
        vocabulary.renew()


def _shares(counts_V: Tensor) -> Tensor:
    return counts_V / counts_V.sum().clamp_min(1e-9)


def check_wanted(wanted: DraftVocab, shape: DrafterShape) -> None:
    """Raises UserError for a size that the model's vocabulary does not have, or that the drafter leaves no
    choice of."""
    if not isinstance(wanted, int):
        return
    if wanted >= shape.layer.vocab_size:
        remedy = f"must be less than the model's vocabulary, {shape.layer.vocab_size}; give fewer, or full"
        raise UserError(f"draft vocabulary: {wanted} {remedy}")
    if not shape.can_choose:
        own = (
            "a head of its own"
            if shape.owns_head
            else f"a vocabulary of its own, of {shape.draft_vocab_size} tokens"
        )
        raise UserError(
            f"draft vocabulary: {wanted} tokens cannot be chosen, for the drafter has {own}; leave it out"
        )


def to_pairs(counts_V: Tensor) -> list[list[float]]:
    """Returns [ids, counts] of the tokens that were seen."""
    ids = counts_V.nonzero()[:, 0]
    return [ids.tolist(), counts_V[ids].tolist()]


def from_pairs(pairs: Sequence[Sequence[float]], vocab_size: int) -> Tensor:
    """Returns the counts that `to_pairs` took apart, float32[V]."""
    counts_V = torch.zeros(vocab_size)
    counts_V[torch.tensor(pairs[0], dtype=torch.int64)] = torch.tensor(pairs[1])
    return counts_V

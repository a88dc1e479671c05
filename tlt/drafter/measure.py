"""The measure of a drafter: how good its two copies are on some responses. Nothing is decided or changed
here.

A response is sent through the engine's target once, which gives p, the distribution that its next token was
drawn from. The drafter, teacher-forced on the same tokens, gives q.

    acceptance = mean over response tokens of sum_v min(p(v), q(v))

is the highest probability with which one draft can be accepted (Leviathan et al., arXiv 2211.17192),
whichever strategies the tuner happened to choose, and without the noise of the tokens drawn. Knows neither
ranks nor engines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.drafter.model import FIRST_PREDICTED, DraftModel, PackedDrafter, align, predicts_response
from tlt.models.attention import PackedCausal
from tlt.models.packed import PackedTransformer
from tlt.types import Rollout

CANARY_TOKENS = 256
"""Response tokens that each rank measures per step; their prompts are read besides."""

ARRIVAL_TOKENS = 16
"""Response tokens read where acceptance is not measured: enough to see whether the engine's copy is the
trainer's."""

Retrieve = Callable[[Sequence[Rollout], Sequence[int]], int]
"""(responses to one prompt, tokens of each that count) → how many of these tokens retrieval alone would
have drafted."""


@dataclass(frozen=True)
class Subject:
    """The drafter in both copies (`model` is trained, `packed` drafts), the target it drafts for, and the
    retrieval that it is compared with."""

    model: DraftModel
    packed: PackedDrafter
    target: PackedTransformer
    retrieve: Retrieve


@dataclass(frozen=True)
class Sample:
    """Some responses that have gone through the target.

    token_ids_N, captured_NF: packed tokens, and what the drafter reads of the target at each.
    lengths: tokens of each response with its prompt.
    is_response_M: marks the R pairs that predict a response token (model.py says what a pair is).
    target_RV: the distributions that these tokens were drawn from, float64.
    """

    token_ids_N: Tensor
    captured_NF: Tensor
    lengths: tuple[int, ...]
    is_response_M: Tensor
    target_RV: Tensor


@dataclass(frozen=True)
class Tally:
    """The sums that one rank measured.

    num_positions, accepted, retrieved: response tokens, and how many of them one draft of the drafter, or of
        retrieval, would have been accepted for.
    distance: relative distance between the logits of the engine's and of the trainer's copy.
    checksum: sum of the trained copy's weights.
    accepted_before: tokens for the drafter in service before this step's training; NaN where that was not
        measured.
    publish_seconds: that publishing its training took, and making sure that it has arrived.
    proposed: sum of the ids of the tokens that it may propose; 0: all of them.
    """

    num_positions: int = 0
    accepted: float = 0.0
    retrieved: int = 0
    distance: float = 0.0
    checksum: float = 0.0
    accepted_before: float = math.nan
    publish_seconds: float = 0.0
    proposed: int = 0


@dataclass(frozen=True)
class Measured:
    """The tallies of all ranks together; acceptance and retrieval are NaN where no position counted, and
    `before`, the acceptance before this step's training, also where there was none. publish_seconds: of
    the slowest."""

    num_positions: int
    acceptance: float
    retrieval: float
    before: float = math.nan
    publish_seconds: float = 0.0

    @classmethod
    def of(cls, tallies: Sequence[Tally]) -> Measured:
        num_positions = sum(tally.num_positions for tally in tallies)
        publish_seconds = max(tally.publish_seconds for tally in tallies)
        if not num_positions:
            return cls(0, math.nan, math.nan, publish_seconds=publish_seconds)
        accepted, retrieved = (
            sum(tally.accepted for tally in tallies),
            sum(tally.retrieved for tally in tallies),
        )
        before = sum(tally.accepted_before for tally in tallies if tally.num_positions)  # NaN if any is
        return cls(
            num_positions,
            acceptance=accepted / num_positions,
            retrieval=retrieved / num_positions,
            before=before / num_positions,
            publish_seconds=publish_seconds,
        )


class Measurement:
    """Measures a drafter on a random few of the responses: one rank's part.

    is_due: whether acceptance is measured. If not, fewer tokens are read, and no position counts unless
        the outputs of the engine's copy are not finite.
    """

    @torch.no_grad()
    def __init__(
        self,
        subject: Subject,
        rollouts: Sequence[Rollout],
        temperature: float,
        rng: random.Random,
        is_due: bool = True,
    ) -> None:
        self.subject, self.rollouts, self.temperature, self.is_due = subject, rollouts, temperature, is_due
        self.counts = draw(rollouts, CANARY_TOKENS if is_due else ARRIVAL_TOKENS, rng)
        chosen = [(rollouts[index], count) for index, count in self.counts.items()]
        self.sample = (
            read(chosen, subject.target, subject.model.config.capture, temperature) if chosen else None
        )
        self._accepted_before = math.nan

    @torch.no_grad()
    def note_before(self) -> None:
        """Measures the drafter that is in service before this step's training is published."""
        if self.is_due and self.sample is not None:
            self._accepted_before = self._accepted(
                self.sample, engine_logits(self.subject.packed, self.subject.target, self.sample)
            )

    @torch.no_grad()
    def tally(self) -> Tally:
        """Returns the tally of the drafter as it is now."""
        subject, sample = self.subject, self.sample
        checksum = float(sum(parameter.double().sum() for parameter in subject.model.parameters()))
        chosen_V = subject.packed.token_ids
        proposed = 0 if chosen_V is None else int(chosen_V.sum())
        if sample is None:
            return Tally(checksum=checksum, proposed=proposed)
        ours_RV = engine_logits(subject.packed, subject.target, sample)
        distance = _distance(ours_RV, trainer_logits(subject.model, subject.target, sample, chosen_V))
        if not self.is_due and bool(ours_RV.isfinite().all()):
            return Tally(distance=distance, checksum=checksum, proposed=proposed)
        accepted, retrieved = (
            self._accepted(sample, ours_RV),
            _num_retrieved(self.rollouts, self.counts, subject.retrieve),
        )
        measured = len(sample.target_RV), accepted, retrieved, distance, checksum, self._accepted_before
        return Tally(*measured, proposed=proposed)

    def _accepted(self, sample: Sample, logits_RV: Tensor) -> float:
        return overlap(sample, logits_RV, self.subject.packed.token_ids, self.temperature)


def _distance(ours_RV: Tensor, theirs_RV: Tensor) -> float:
    """Returns |ours - theirs| / |theirs|; 0 where not even the trainer's logits are finite, for then it
    says nothing."""
    return float((ours_RV - theirs_RV).norm() / theirs_RV.norm()) if bool(theirs_RV.isfinite().all()) else 0.0


def _num_retrieved(rollouts: Sequence[Rollout], counts: dict[int, int], retrieve: Retrieve) -> int:
    """Returns how many of the counted tokens retrieval would have drafted, with all responses to a prompt
    as its source."""
    groups: dict[str, list[tuple[Rollout, int]]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.problem_id, []).append((rollout, counts.get(index, 0)))
    drawn = [group for group in groups.values() if any(count for _, count in group)]
    return sum(retrieve([rollout for rollout, _ in group], [count for _, count in group]) for group in drawn)


def draw(rollouts: Sequence[Rollout], max_tokens: int, rng: random.Random) -> dict[int, int]:
    """Returns the index of each chosen response → how many of its tokens count.

    Whole responses are chosen at random until `max_tokens` are used up; the last one is cut off. Prompts
    are free, so that something is measured however long they are. A response whose first token no pair
    predicts (its prompt has one token) is not chosen.
    """
    counts: dict[int, int] = {}
    for index in rng.sample(range(len(rollouts)), len(rollouts)):
        count = min(len(rollouts[index].token_ids), max_tokens)
        if count > 0 and len(rollouts[index].prompt_ids) >= FIRST_PREDICTED:
            counts[index] = count
            max_tokens -= count
    return counts


def read(
    chosen: Sequence[tuple[Rollout, int]],
    target: PackedTransformer,
    capture: tuple[int, ...],
    temperature: float,
) -> Sample:
    """Sends the chosen responses through the target, in one packed forward.

    chosen: responses, and how many of their tokens count; the last of these is predicted but not read.
    """
    rows = [[*rollout.prompt_ids, *rollout.token_ids[: count - 1]] for rollout, count in chosen]
    lengths = tuple(len(row) for row in rows)
    token_ids_N = torch.tensor([token for row in rows for token in row], device=target.device)
    attend = PackedCausal(target.config, lengths)
    features_NE, captured_NF = target.forward_capturing(
        token_ids_N, attend.positions(target.device), attend, capture
    )
    pairs = align(lengths, target.device)
    masks = [
        predicts_response(len(rollout.prompt_ids), 0, n)
        for (rollout, _), n in zip(chosen, lengths, strict=True)
    ]
    is_response_M = torch.cat(masks).to(target.device)
    target_RV = distribution(target.logits(features_NE[pairs.token_index_M[is_response_M]]), temperature)
    return Sample(token_ids_N, captured_NF, lengths, is_response_M, target_RV)


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Returns softmax at the temperature, in float64; at temperature 0 all on the likeliest token. NaN
    stays NaN."""
    if temperature == 0:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).double() + 0.0 * logits.double()
    return (logits.double() / temperature).softmax(dim=-1)


def overlap(sample: Sample, logits_RV: Tensor, token_ids: Tensor | None, temperature: float) -> float:
    """Returns the sum over positions of sum_v min(p(v), q(v)), q being the softmax of `logits_RV` at the
    temperature.

    token_ids: the target's ids of a reduced draft vocabulary, beyond which q is 0; None: it is the
        target's.
    """
    target_RV = sample.target_RV if token_ids is None else sample.target_RV[:, token_ids]
    return float(torch.minimum(target_RV, distribution(logits_RV, temperature)).sum())


def engine_logits(drafter: PackedDrafter, target: PackedTransformer, sample: Sample) -> Tensor:
    """Returns the logits [R, draft vocabulary] of the engine's copy, float64."""
    pairs = align(sample.lengths, target.device)
    embeddings_ME = target.embed(sample.token_ids_N[pairs.token_index_M])
    hidden_ME = drafter.fuse(sample.captured_NF[pairs.feature_index_M])
    attend = PackedCausal(drafter.config.layer, pairs.lengths)
    hidden_ME = drafter.forward(embeddings_ME, hidden_ME, pairs.positions_M, attend)
    return drafter.logits(hidden_ME[sample.is_response_M], target).double()


def trainer_logits(
    model: DraftModel, target: PackedTransformer, sample: Sample, token_ids: Tensor | None = None
) -> Tensor:
    """Returns the logits [R, draft vocabulary] of the copy that is trained, computed in its own dtype,
    float64. token_ids: what the engine's copy proposes; None: all, or the drafter's own vocabulary."""
    pairs, dtype = align(sample.lengths, target.device), next(model.parameters()).dtype
    embeddings_ME = target.embed(sample.token_ids_N[pairs.token_index_M]).to(dtype)
    hidden_ME = model.fuse(sample.captured_NF[pairs.feature_index_M].to(dtype))
    attend = PackedCausal(model.config.layer, pairs.lengths)
    hidden_ME = model(embeddings_ME, hidden_ME, pairs.positions_M, attend)
    rows_VE = model.restrict(target.head_VE) if token_ids is None else target.head_VE[token_ids]
    head_VE = model.lm_head.weight if model.config.owns_head else rows_VE.to(dtype)
    return model.logits(hidden_ME[sample.is_response_M], head_VE).double()

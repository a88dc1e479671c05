"""The measure of a drafter: its acceptance on sampled responses, and the agreement of its two copies.

p is the target's distribution of a token, q that of the drafter's first guess, teacher-forced.

    acceptance = mean over response tokens of sum_v min(p(v), q(v))

It bounds the probability that a draft token is accepted (Leviathan et al., arXiv 2211.17192). It depends
neither on the tuner's strategies nor on the tokens drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.base.records import DrafterCheck
from tlt.base.types import Rollout
from tlt.base.uploads import upload
from tlt.drafter.model import Anchors, DraftModel, PackedDrafter, flatten_anchors
from tlt.drafter.pairs import FIRST_PREDICTED, TOKEN_AHEAD, predicts_response
from tlt.models.attention import PackedCausal
from tlt.models.target import Target

CANARY_TOKENS = 256
"""Response tokens measured per rank and step."""

READ_FOR_EACH = 8
"""Bounds the tokens read, prompts included, per measured token."""

READ_AT_ONCE = 8192

ARRIVAL_TOKENS = 16
"""Response tokens read when acceptance is not due, behind so many of the prompt."""

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""By dtype, largest relative distance between the logits of the two copies."""

Retrieve = Callable[[Sequence[Rollout], Sequence[int]], int]
"""(responses to one prompt, tokens counted of each) → counted tokens that retrieval drafts"""


@dataclass(frozen=True)
class DrafterCopies:
    model: DraftModel
    packed: PackedDrafter
    target: Target
    retrieve: Retrieve


@dataclass(frozen=True)
class Sample:
    """lengths: tokens of each response with its prompt.
    anchors: by response, the token before each measured one; R in all.
    target_RV: the target's distributions of the measured tokens, float64.
    """

    token_ids_N: Tensor
    captured_NF: Tensor
    lengths: tuple[int, ...]
    anchors: Anchors
    temperature: float
    target_RV: Tensor

    @property
    def tokens_R(self) -> Tensor:
        index_R = upload(flatten_anchors(self.lengths, self.anchors), self.token_ids_N.device)
        return self.token_ids_N[index_R]

    def overlap(self, logits_RV: Tensor, token_ids: Tensor | None) -> float:
        """token_ids: reduced draft vocabulary, outside of which q is 0."""
        target_RV = self.target_RV if token_ids is None else self.target_RV[:, token_ids]
        return float(torch.minimum(target_RV, distribution(logits_RV, self.temperature)).sum())


@dataclass(frozen=True)
class Tally:
    """accepted: expected accepted draft tokens.
    retrieved: tokens that retrieval would have drafted.
    distance: relative distance between the logits of the two copies.
    checksum: sum of the trained weights.
    accepted_before: `accepted` before this step's training; NaN: not measured.
    proposed: sum of the draft vocabulary's token ids; 0: all tokens.
    """

    num_positions: int = 0
    accepted: float = 0.0
    retrieved: int = 0
    distance: float = 0.0
    checksum: float = 0.0
    accepted_before: float = math.nan
    publish_seconds: float = 0.0
    proposed: int = 0


class Measurement:
    """Reads random responses of one rank. If not `is_due`, a small sample with cut prompts compares the two
    copies, and acceptance is measured only if the engine's outputs are not finite."""

    @torch.no_grad()
    def __init__(
        self,
        copies: DrafterCopies,
        rollouts: Sequence[Rollout],
        temperature: float,
        rng: random.Random,
        is_due: bool = True,
    ) -> None:
        if not is_due:
            rollouts = [replace(one, prompt_ids=one.prompt_ids[-ARRIVAL_TOKENS:]) for one in rollouts]
        self.copies, self.rollouts, self.is_due = copies, rollouts, is_due
        self.counts = draw_counts(rollouts, CANARY_TOKENS if is_due else ARRIVAL_TOKENS, rng)
        capture = copies.model.config.capture
        self.sample = (
            read_sample(rollouts, self.counts, copies.target, capture, temperature) if self.counts else None
        )

    @torch.no_grad()
    def accepted(self) -> float:
        if not self.is_due or self.sample is None:
            return math.nan
        packed = self.copies.packed
        return self.sample.overlap(engine_logits(packed, self.copies.target, self.sample), packed.token_ids)

    @torch.no_grad()
    def tally(self) -> Tally:
        copies, sample, token_ids = self.copies, self.sample, self.copies.packed.token_ids
        checksum = float(sum(parameter.double().sum() for parameter in copies.model.parameters()))
        tally = Tally(checksum=checksum, proposed=0 if token_ids is None else int(token_ids.sum()))
        if sample is None:
            return tally
        ours_RV = engine_logits(copies.packed, copies.target, sample)
        theirs_RV = trainer_logits(copies.model, copies.target, sample, token_ids)
        tally = replace(tally, distance=_distance(ours_RV, theirs_RV))
        if not self.is_due and bool(ours_RV.isfinite().all()):
            return tally
        return replace(
            tally,
            num_positions=len(sample.target_RV),
            accepted=sample.overlap(ours_RV, token_ids),
            retrieved=_num_retrieved(self.rollouts, self.counts, copies.retrieve),
        )


def _distance(ours_RV: Tensor, theirs_RV: Tensor) -> float:
    return float((ours_RV - theirs_RV).norm() / theirs_RV.norm()) if bool(theirs_RV.isfinite().all()) else 0.0


def _num_retrieved(rollouts: Sequence[Rollout], counts: Mapping[int, int], retrieve: Retrieve) -> int:
    groups: dict[str, list[tuple[Rollout, int]]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.problem_id, []).append((rollout, counts.get(index, 0)))
    drawn = [group for group in groups.values() if any(count for _, count in group)]
    return sum(retrieve([rollout for rollout, _ in group], [count for _, count in group]) for group in drawn)


def to_check(tallies: Sequence[Tally], version: int, training: str) -> DrafterCheck:
    num_positions = sum(tally.num_positions for tally in tallies)

    def mean(sums: Iterable[float]) -> float:
        return sum(sums) / num_positions if num_positions else math.nan

    return DrafterCheck(
        version,
        acceptance=mean(tally.accepted for tally in tallies),
        retrieval=mean(tally.retrieved for tally in tallies),
        training=training,
        before=mean(tally.accepted_before for tally in tallies if tally.num_positions),
        publish_seconds=max(tally.publish_seconds for tally in tallies),
    )


def check_arrival(tallies: Sequence[Tally], version: int, tolerance: float) -> None:
    """Raises RuntimeError if weights or draft vocabularies differ between ranks, or logits between the two
    copies."""
    for rank, tally in enumerate(tallies):
        if tally.checksum != tallies[0].checksum:
            raise RuntimeError(
                f"drafter version {version}: rank {rank} holds other weights than rank 0 "
                f"(their sums are {tally.checksum!r} and {tallies[0].checksum!r}); the average did not arrive"
            )
        if tally.proposed != tallies[0].proposed:
            what = f"rank {rank} proposes other tokens than rank 0; their choices differ"
            raise RuntimeError(f"drafter version {version}: {what}")
        if not tally.distance <= tolerance:
            raise RuntimeError(
                f"drafter version {version} did not arrive in rank {rank}'s engine: its outputs are "
                f"{tally.distance:.1e} away from the trainer's, where {tolerance:.0e} is allowed"
            )


def draw_counts(rollouts: Sequence[Rollout], max_tokens: int, rng: random.Random) -> dict[int, int]:
    """Returns the number of tokens to measure by the response's index.

    Takes whole responses up to `max_tokens`, the last one cut off. A response to a one-token prompt is
    skipped: no pair predicts its first token.
    """
    counts: dict[int, int] = {}
    left_to_read = READ_FOR_EACH * max_tokens
    for index in rng.sample(range(len(rollouts)), len(rollouts)):
        rollout = rollouts[index]
        count = min(len(rollout.token_ids), max_tokens)
        num_read = len(rollout.prompt_ids) + count
        if count > 0 and len(rollout.prompt_ids) >= FIRST_PREDICTED:
            if counts and num_read > left_to_read:
                break
            counts[index] = count
            max_tokens, left_to_read = max_tokens - count, left_to_read - num_read
    return counts


def read_sample(
    rollouts: Sequence[Rollout],
    counts: Mapping[int, int],
    target: Target,
    capture: tuple[int, ...],
    temperature: float,
) -> Sample:
    """A response's last measured token is predicted but not read."""
    rows = [[*rollouts[i].prompt_ids, *rollouts[i].token_ids[: count - 1]] for i, count in counts.items()]
    lengths = tuple(len(row) for row in rows)
    anchors = []
    for index, length in zip(counts, lengths, strict=True):
        is_response_M = predicts_response(len(rollouts[index].prompt_ids), 0, length)
        anchors.append((is_response_M.nonzero()[:, 0] + TOKEN_AHEAD).tolist())
    token_ids, captured, targets = list[Tensor](), list[Tensor](), list[Tensor]()
    for group in _groups(lengths):
        ids_N = torch.tensor([token for row in rows[group] for token in row], device=target.device)
        attend = PackedCausal(target.config, lengths[group])
        features_NE, captured_NF = target.forward_capturing(
            ids_N, attend.positions(target.device), attend, capture
        )
        index_R = upload(flatten_anchors(lengths[group], anchors[group]), target.device)
        token_ids.append(ids_N)
        captured.append(captured_NF)
        targets.append(distribution(target.logits(features_NE[index_R]), temperature))
    parts = torch.cat(token_ids), torch.cat(captured)
    return Sample(*parts, lengths, anchors, temperature, torch.cat(targets))


def _groups(lengths: Sequence[int]) -> Iterator[slice]:
    first, num_tokens = 0, 0
    for end, length in enumerate(lengths):
        if num_tokens and num_tokens + length > READ_AT_ONCE:
            yield slice(first, end)
            first, num_tokens = end, 0
        num_tokens += length
    yield slice(first, len(lengths))


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """float64; temperature 0 gives a one-hot argmax. NaN stays NaN."""
    if temperature == 0:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).double() + 0.0 * logits.double()
    return (logits.double() / temperature).softmax(dim=-1)


def engine_logits(drafter: PackedDrafter, target: Target, sample: Sample) -> Tensor:
    hidden_RE = drafter.predict(sample, sample.anchors, lambda ids: target.embed(ids).to(drafter.dtype))
    logits_RV, bias_RV = drafter.logits(hidden_RE, target), drafter.bias(sample.tokens_R)
    return (logits_RV if bias_RV is None else logits_RV + bias_RV).double()


def trainer_logits(
    model: DraftModel, target: Target, sample: Sample, token_ids: Tensor | None = None
) -> Tensor:
    """[R, draft vocabulary], float64, computed in the model's dtype."""
    dtype = next(model.parameters()).dtype
    hidden_RE = model.predict(sample, sample.anchors, lambda ids: target.embed(ids).to(dtype))
    logits_RV = model.logits(hidden_RE, model.rows(target.head_VE, token_ids))
    bias_RV = model.bias(sample.tokens_R, token_ids)
    return (logits_RV if bias_RV is None else logits_RV + bias_RV).double()

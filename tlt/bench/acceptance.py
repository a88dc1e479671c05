"""Measures how well a drafter guesses: acceptance by position, by the target's entropy and by the drafter's own confidence.

    engine step   propose a chain ─▶ target's forward ─▶ verify ─▶ commit
                      └ confidence of each guess   └ entropy where it was made, and whether it was accepted

A guess counts where all guesses before it were accepted: for the others nobody knows what the target would have said. Drafter
and engine are those of a rollout; they are watched, not replaced.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from torch import Tensor

from tlt.bench.measure import Ratio, in_turns
from tlt.build.engine import EngineSettings, build_engine, build_learned
from tlt.build.model import Model
from tlt.config.drafter import DrafterSection
from tlt.drafter.drafting.learned import LearnedDrafter, LearnedProposal, OnVerdicts
from tlt.drafter.formats.folder import StoredDrafter
from tlt.engine.engine import RolloutEngine
from tlt.kinds import DraftVocab
from tlt.speculative.params import BatchParams
from tlt.speculative.verify import Noise, Verify, verify
from tlt.tuning.tuner import Fixed
from tlt.types import DraftTree, Request, Strategy, UserError, Verdict

ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.3, 0.7, 1.5, float("inf"))
"""Nats. Most tokens of reasoning are nearly certain; they get the narrow buckets."""

NUM_CONFIDENCE_BUCKETS = 10


@dataclass(frozen=True)
class Bucket:
    """The guesses whose entropy or confidence lies in [low, high): their number, its mean over them, the share accepted.

    high: None for the last bucket by entropy, which has no upper end.
    """

    low: float
    high: float | None
    num_guesses: int
    mean: float
    accepted: float


@dataclass(frozen=True)
class Acceptance:
    """The share of a drafter's guesses that were accepted, in chains of one length.

    accept_length: tokens committed per verification, the target's own token included.
    by_position: share of verifications whose first 1, 2, ... guesses were all accepted: unconditional survival, as vLLM has it.
    by_entropy: buckets of the target's entropy in nats, at the sampling temperature (at 1 where sampling is greedy).
    by_confidence: buckets of the probability that the drafter itself gave its guess.
    calibration_error: |confidence - accepted|, averaged over the buckets of `by_confidence`, weighted by their guesses.
    draft_vocab: tokens that could be guessed in the end.
    """

    num_verifications: int
    accept_length: float
    by_position: tuple[float, ...]
    by_entropy: tuple[Bucket, ...]
    by_confidence: tuple[Bucket, ...]
    calibration_error: float
    draft_vocab: int


@dataclass
class _Guesses:
    """Lists with one entry for each guess that counts.

    entropy_BN: the target's, at every node of the step that has just been verified; the drafter is told of it next.
    """

    confidence: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    entropy_BN: list[list[float]] = field(default_factory=list)

    def note(self, proposal: LearnedProposal, verdicts: Sequence[Verdict]) -> None:
        """Takes note of what became of a proposal's guesses."""
        assert proposal.logprobs_BD is not None, "a drafter that is watched gives them"
        rows = zip(proposal.logprobs_BD.exp().tolist(), self.entropy_BN, verdicts, strict=True)
        for confidence_D, entropy_N, verdict in rows:
            for index in range(min(verdict.num_accepted + 1, len(confidence_D))):
                self.confidence.append(confidence_D[index])
                self.entropy.append(entropy_N[index])
                self.accepted.append(index < verdict.num_accepted)


def observe(
    model: Model,
    drafter: StoredDrafter,
    requests: Sequence[Request],
    depth: int,
    max_batch_size: int,
    draft_vocab: DraftVocab = "full",
) -> Acceptance:
    """Generates the responses with chains of `depth` guesses, and returns what became of the guesses.

    draft_vocab: tokens that may be guessed (drafter/vocabulary.py).
    Raises UserError where prompts and responses are so short that nothing was guessed.
    """
    guesses = _Guesses()

    def watch(tree: DraftTree, logits_BNV: Tensor, noise_BNV: Noise, params: BatchParams) -> list[Verdict]:
        verdicts = verify(tree, logits_BNV, noise_BNV, params)
        if tree.num_nodes > 1:
            logprobs_BNV = params.scale(logits_BNV).log_softmax(dim=-1)
            guesses.entropy_BN = (-(logprobs_BNV.exp() * logprobs_BNV).sum(dim=-1)).tolist()
        return verdicts

    engine, learned = _chaining(model, drafter, depth, max_batch_size, draft_vocab, watch, guesses.note)
    for _ in engine.generate(requests):
        pass
    stats = engine.stats
    if stats.accept_length is None:
        raise UserError(
            "drafter eval: not one guess was verified; give prompts of two tokens or more, or let responses be longer"
        )
    edges = (*(index / NUM_CONFIDENCE_BUCKETS for index in range(NUM_CONFIDENCE_BUCKETS)), 1.0 + 1e-6)
    by_confidence = _buckets(guesses.confidence, guesses.accepted, edges)
    return Acceptance(
        num_verifications=stats.num_verifications,
        accept_length=stats.accept_length,
        by_position=tuple(stats.accept_by_depth),
        by_entropy=_buckets(guesses.entropy, guesses.accepted, ENTROPY_EDGES),
        by_confidence=by_confidence,
        draft_vocab=learned.model.num_proposed,
        calibration_error=sum(abs(b.mean - b.accepted) * b.num_guesses for b in by_confidence) / len(guesses.accepted),
    )


def _buckets(values: Sequence[float], accepted: Sequence[bool], edges: Sequence[float]) -> tuple[Bucket, ...]:
    """Returns the buckets between the edges, without the empty ones."""
    buckets = []
    for low, high in pairwise(edges):
        inside = [index for index, value in enumerate(values) if low <= value < high]
        if inside:
            mean = statistics.fmean(values[i] for i in inside)
            upper = high if math.isfinite(high) else None
            buckets.append(Bucket(low, upper, len(inside), mean, statistics.fmean(accepted[i] for i in inside)))
    return tuple(buckets)


def speedup(
    model: Model,
    drafter: StoredDrafter,
    requests: Sequence[Request],
    depth: int,
    max_batch_size: int,
    num_rounds: int,
    draft_vocab: DraftVocab = "full",
) -> tuple[Ratio, int]:
    """Generates the same responses in turns without speculation and with chains of `depth` guesses.

    Returns the ratio of seconds without / seconds with, and how many responses differed (in float32 a near-tie may).
    """
    texts: list[dict[tuple[str, int], tuple[int, ...]]] = []

    def seconds(make: Callable[[], RolloutEngine]) -> float:
        engine = make()
        start = time.perf_counter()
        rollouts = list(engine.generate(requests))
        elapsed = time.perf_counter() - start
        texts.append({(rollout.problem_id, rollout.sample_index): rollout.token_ids for rollout in rollouts})
        return elapsed

    off = partial(build_engine, model.config, model.tensors, EngineSettings(max_batch_size=max_batch_size))

    def chain() -> RolloutEngine:
        return _chaining(model, drafter, depth, max_batch_size, draft_vocab)[0]

    measured = in_turns({"off": partial(seconds, off), "chain": partial(seconds, chain)}, num_rounds)
    num_different = sum(other[key] != tokens for other in texts for key, tokens in texts[0].items())
    return Ratio.between(measured["off"], measured["chain"]), num_different


def _chaining(
    model: Model,
    drafter: StoredDrafter,
    depth: int,
    max_batch_size: int,
    draft_vocab: DraftVocab,
    verify: Verify = verify,
    on_verdicts: OnVerdicts | None = None,
) -> tuple[RolloutEngine, LearnedDrafter]:
    """Returns an engine that drafts chains of full length, and its drafter: a threshold would cut some short, and nobody would
    see how they end."""
    drafting = DrafterSection(confidence_threshold=0.0, vocabulary=draft_vocab)
    settings = EngineSettings(max_batch_size=max_batch_size, drafting=drafting)
    tuner = Fixed(Strategy("learned", depth, 1, depth))
    engine = build_engine(model.config, model.tensors, settings, tuner=tuner, verify=verify)
    learned = build_learned(engine, drafter, settings, on_verdicts)
    engine.load_drafter(learned)
    return engine, learned

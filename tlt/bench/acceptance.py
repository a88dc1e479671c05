"""Measures how well a drafter guesses: acceptance by position, by the target's entropy and by the drafter's own confidence.

    engine step   propose a chain ─▶ target's forward ─▶ verify ─▶ commit
                      └ confidence of each guess   └ entropy where it was made, and whether it was accepted

A guess counts where all guesses before it were accepted: for the others nobody knows what the target would have said. Drafter
and engine are those of a rollout; they are watched, not replaced.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tlt.bench.measure import Ratio, side_by_side
from tlt.build import EngineSettings, build_engine, build_learned
from tlt.config.schema import DrafterSection
from tlt.drafter.folder import StoredDrafter
from tlt.drafter.learned import LearnedDrafter, LearnedProposal
from tlt.drafter.model import PackedDrafter
from tlt.engine.engine import RolloutEngine
from tlt.models.decoder import ModelConfig
from tlt.speculative.sampling import BatchParams
from tlt.speculative.verify import verify
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
    """

    num_verifications: int
    accept_length: float
    by_position: tuple[float, ...]
    by_entropy: tuple[Bucket, ...]
    by_confidence: tuple[Bucket, ...]
    calibration_error: float


@dataclass
class _Guesses:
    """Lists with one entry for each guess that counts."""

    confidence: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)


class _ObservedDrafter(LearnedDrafter):
    """Drafts as ever, and notes the probability that it gives each token it drafts."""

    confidence_BD = torch.empty(0, 0)

    def propose(self, *args: Any, **kwargs: Any) -> LearnedProposal:
        self._logprobs: list[Tensor] = []
        proposal = super().propose(*args, **kwargs)
        drafted_BD = proposal.tree.tokens_BN[:, 1:].contiguous()
        if self.model.token_ids is not None:
            drafted_BD = torch.searchsorted(self.model.token_ids, drafted_BD)
        logprobs_BDV = torch.stack(self._logprobs, dim=1)
        self.confidence_BD = logprobs_BDV.gather(-1, drafted_BD[..., None])[..., 0].exp()
        return proposal

    def _scores(self, level: Any) -> Tensor:
        self._logprobs.append(level.scaled_BTV[:, 0].log_softmax(dim=-1))
        return super()._scores(level)


def observe(
    config: ModelConfig,
    policy: Mapping[str, Tensor],
    drafter: StoredDrafter,
    requests: Sequence[Request],
    depth: int,
    max_batch_size: int,
) -> Acceptance:
    """Generates the responses with chains of `depth` guesses, and returns what became of the guesses.

    Raises UserError where prompts and responses are so short that nothing was guessed.
    """
    guesses = _Guesses()
    observed: _ObservedDrafter

    def watch(tree: DraftTree, logits_BNV: Tensor, noise_BNV: Tensor, params: BatchParams) -> list[Verdict]:
        verdicts = verify(tree, logits_BNV, noise_BNV, params)
        if tree.num_nodes > 1:
            logprobs_BNV = params.scale(logits_BNV).log_softmax(dim=-1)
            entropy = -(logprobs_BNV.exp() * logprobs_BNV).sum(dim=-1)
            for row, (entropy_N, confidence_D) in enumerate(
                zip(entropy.tolist(), observed.confidence_BD.tolist(), strict=True)
            ):
                num_accepted = verdicts[row].num_accepted
                for index in range(min(num_accepted + 1, depth)):
                    guesses.confidence.append(confidence_D[index])
                    guesses.entropy.append(entropy_N[index])
                    guesses.accepted.append(index < num_accepted)
        return verdicts

    tuner = Fixed(Strategy("learned", depth, 1, depth))
    engine = build_engine(config, policy, _settings(max_batch_size), tuner=tuner, verify=watch)
    packed = PackedDrafter.from_tensors(drafter.config, drafter.tensors, torch.float32)
    observed = _ObservedDrafter(packed, engine.model, max_batch_size, confidence_threshold=0.0)
    engine.load_drafter(observed)
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
    config: ModelConfig,
    policy: Mapping[str, Tensor],
    drafter: StoredDrafter,
    requests: Sequence[Request],
    depth: int,
    max_batch_size: int,
    num_rounds: int,
) -> tuple[Ratio, int]:
    """Generates the same responses in turns without speculation and with chains of `depth` guesses.

    Returns the ratio of seconds without / seconds with, and how many responses differed (in float32 a near-tie may).
    """

    def make(strategy: Strategy | None) -> RolloutEngine:
        tuner = None if strategy is None else Fixed(strategy)
        engine = build_engine(config, policy, settings, tuner=tuner)
        if strategy is not None:
            engine.load_drafter(build_learned(engine, drafter, settings))
        return engine

    settings = _settings(max_batch_size)
    variants = {"off": lambda: make(None), "chain": lambda: make(Strategy("learned", depth, 1, depth))}
    traces, num_different = side_by_side(variants, requests, num_rounds)
    pairs = zip(traces["off"], traces["chain"], strict=True)
    return Ratio.of([off.seconds / chain.seconds for off, chain in pairs]), num_different


def _settings(max_batch_size: int) -> EngineSettings:
    """Returns settings for chains of full length: a threshold would cut some short, and nobody would see how they end."""
    return EngineSettings(max_batch_size=max_batch_size, drafting=DrafterSection(confidence_threshold=0.0))

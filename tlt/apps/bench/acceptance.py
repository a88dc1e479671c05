"""Measures a drafter's acceptance by position, by the target's entropy and by the drafter's confidence.

    engine step   propose a chain ─▶ target's forward ─▶ verify ─▶ commit
                      └ confidence of each guess   └ entropy at its node, and whether it was accepted

A guess counts if all guesses before it were accepted; otherwise the target's token is unknown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from torch import Tensor

from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Request, Rollout, UserError, Verdict
from tlt.drafter.drafting.learned.drafter import LearnedDrafter, LearnedProposal, OnVerdicts
from tlt.drafter.formats.folder import StoredDrafter
from tlt.engine.build.engine import build_engine, build_learned
from tlt.engine.build.model import Model
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.settings import EngineSettings
from tlt.speculation.law.params import BatchParams
from tlt.speculation.law.verify import Noise, Verify, verify
from tlt.speculation.tuner.tuner import Fixed
from tlt.training.report.ratio import Ratio, in_turns, seconds_of

ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.3, 0.7, 1.5, float("inf"))
"""In nats. Most tokens of reasoning are nearly certain, so low entropies get narrow buckets."""

NUM_CONFIDENCE_BUCKETS = 10


@dataclass(frozen=True)
class Bucket:
    """Guesses whose entropy or confidence lies in [low, high)."""

    low: float
    high: float | None
    """None: unbounded."""
    num_guesses: int
    mean: float
    """Mean entropy or confidence."""
    accepted: float


@dataclass(frozen=True)
class ChainAcceptance:
    num_verifications: int
    accept_length: float
    """Tokens committed per verification, the target's own token included."""
    by_position: tuple[float, ...]
    """Share of verifications whose first 1, 2, ... guesses were all accepted (unconditional, as in vLLM)."""
    by_entropy: tuple[Bucket, ...]
    """In nats, at the sampling temperature (1 for greedy sampling)."""
    by_confidence: tuple[Bucket, ...]
    calibration_error: float
    """|confidence - accepted| averaged over `by_confidence`, weighted by guesses."""
    draft_vocab: int
    """Size of the draft vocabulary at the end."""


@dataclass(frozen=True)
class Chains:
    """A model, and a drafter that proposes chains of `depth` guesses."""

    model: Model
    drafter: StoredDrafter
    depth: int
    settings: EngineSettings

    def engine(
        self, verify: Verify = verify, on_verdicts: OnVerdicts | None = None
    ) -> tuple[RolloutEngine, LearnedDrafter]:
        tuner = Fixed(Strategy("learned", self.depth, 1, self.depth))
        engine = build_engine(
            self.model.config, self.model.tensors, self.settings, tuner=tuner, verify=verify
        )
        learned = build_learned(engine, self.drafter, self.settings, on_verdicts)
        engine.load_drafter(learned)
        return engine, learned


def observe(chains: Chains, requests: Sequence[Request]) -> ChainAcceptance:
    """Raises UserError where prompts and responses are too short for any guess."""
    confidence, entropy, accepted = list[float](), list[float](), list[bool]()
    entropy_BN: list[list[float]] = []  # the target's, at every node of the latest step

    def watch(tree: DraftTree, logits_BNV: Tensor, noise: Noise, params: BatchParams) -> list[Verdict]:
        if tree.num_nodes > 1:
            logprobs_BNV = params.scale(logits_BNV).log_softmax(dim=-1)
            entropy_BN[:] = (-(logprobs_BNV.exp() * logprobs_BNV).sum(dim=-1)).tolist()
        return verify(tree, logits_BNV, noise, params)

    def note(proposal: LearnedProposal, verdicts: Sequence[Verdict]) -> None:
        assert proposal.logprobs_BD is not None, "a drafter with on_verdicts gives them"
        rows = zip(proposal.logprobs_BD.exp().tolist(), entropy_BN, verdicts, strict=True)
        for confidence_D, entropy_N, verdict in rows:
            num_guesses = min(verdict.num_accepted + 1, len(confidence_D))
            confidence.extend(confidence_D[:num_guesses])
            entropy.extend(entropy_N[:num_guesses])
            accepted.extend(index < verdict.num_accepted for index in range(num_guesses))

    engine, learned = chains.engine(watch, note)
    for _ in engine.generate(requests):
        pass
    stats = engine.stats
    if stats.accept_length is None:
        remedy = "give prompts of two tokens or more, or let responses be longer"
        raise UserError(f"drafter eval: not one guess was verified; {remedy}")
    edges = (*(index / NUM_CONFIDENCE_BUCKETS for index in range(NUM_CONFIDENCE_BUCKETS)), 1.0 + 1e-6)
    by_confidence = _buckets(confidence, accepted, edges)
    error = sum(abs(b.mean - b.accepted) * b.num_guesses for b in by_confidence) / len(accepted)
    return ChainAcceptance(
        num_verifications=stats.num_verifications,
        accept_length=stats.accept_length,
        by_position=tuple(stats.draft_acceptance_rate_pos),
        by_entropy=_buckets(entropy, accepted, ENTROPY_EDGES),
        by_confidence=by_confidence,
        calibration_error=error,
        draft_vocab=learned.model.num_proposed,
    )


def _buckets(values: Sequence[float], accepted: Sequence[bool], edges: Sequence[float]) -> tuple[Bucket, ...]:
    buckets = []
    for low, high in pairwise(edges):
        inside = [
            (value, is_kept) for value, is_kept in zip(values, accepted, strict=True) if low <= value < high
        ]
        if inside:
            mean, share = map(statistics.fmean, zip(*inside, strict=True))
            buckets.append(Bucket(low, high if math.isfinite(high) else None, len(inside), mean, share))
    return tuple(buckets)


def speedup(chains: Chains, requests: Sequence[Request], num_rounds: int) -> tuple[Ratio, int]:
    """Generates the same responses in turns. Returns seconds without / with speculation, and how many
    responses differed (near-ties, in float32)."""
    texts: list[dict[tuple[str, int], tuple[int, ...]]] = []
    model = chains.model

    def seconds(has_chains: bool) -> float:
        engine = (
            chains.engine()[0] if has_chains else build_engine(model.config, model.tensors, chains.settings)
        )
        rollouts: list[Rollout] = []
        elapsed = seconds_of(lambda: rollouts.extend(engine.generate(requests)))
        texts.append({(rollout.problem_id, rollout.sample_index): rollout.token_ids for rollout in rollouts})
        return elapsed

    measured = in_turns({"off": partial(seconds, False), "chain": partial(seconds, True)}, num_rounds)
    num_different = sum(other[key] != tokens for other in texts for key, tokens in texts[0].items())
    return Ratio.between(measured["off"], measured["chain"]), num_different

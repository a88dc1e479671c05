"""Assumptions for a machine that nobody has measured here: a cost curve, and acceptance as the TLT paper reports it.

seconds of a step = plain step x (1.42 + 0.067 depth + 0.0026 verified), and more where the forward is full (`GpuSeconds`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tlt.config.schema import Config
from tlt.drafter.drafting.calibration import DEFAULT_CONFIDENCE_THRESHOLD
from tlt.simulate.assumptions import Agreement, Assumptions, Followed, LogNormalLengths, SpotSpeed
from tlt.simulate.measured import Measured
from tlt.training.rollout.idle_choice import HORIZON
from tlt.tuning.cost_model import CostModel
from tlt.tuning.step_costs import Work
from tlt.types import Strategy

ACCEPT_LENGTHS = {(8, 16): 6.34, (12, 32): 8.05, (12, 64): 8.76}
"""(depth, tokens verified) → tokens per verification: Qwen2.5-32B with a trained drafter, candidates of 8 (arXiv 2511.16665, as
third parties quote it). The fastest depth of each number, for Acceptance has one survival curve for all trees of one budget."""
_CHAINS = (1, 2, 4, 8)
_WIDTH = 8
_CHAIN_RATE = 0.8
"""Chance that a token of a drafter's chain is kept if all before it are."""
_CHANGE = math.log(6.53 / 4.59)
"""What training in RL has done to the accept length, as third parties quote the paper: as much is taken to be lost within
tlt.training.rollout.idle_choice.HORIZON steps without it."""
_DRAFTING, _PER_DEPTH, _PER_VERIFIED = 0.42, 0.067, 0.0026
_PER_HOST = 8
_FOLLOWED = (32, 64, 128, 256)
AGREEMENT = {1: Followed(3600.0, 32.0, 32.0), 2: Followed(465.0, 32.0, 62.0)}
"""By age, of the shipped model with a learning rate of 1e-4: 87.5 % and 47 % of the 24,713 tokens of 64 responses lie before
the first difference, 6 and 25 responses have one, and 50 % and 34 % of the tokens behind it lie in matching stretches. How long
such a stretch is was not measured."""


@dataclass(frozen=True)
class GpuSeconds:
    """plain: seconds of a step without speculation.  knee: tokens in one forward up to which it takes no longer; beyond, its
    time grows with them."""

    plain: float
    knee: float

    def __call__(self, arm: Strategy, nodes: float, batch_size: int, mean_length: float) -> float:
        load = max(batch_size * (1 + nodes) / self.knee, 1.0)
        drafts = arm.elsewhere if arm.follows else arm
        drafting = 0.0 if drafts.is_off else _DRAFTING + _PER_DEPTH * drafts.depth
        return self.plain * (drafting + (1 + _PER_VERIFIED * nodes) * load)


def assume_gpu(config: Config, seconds: GpuSeconds, lengths: LogNormalLengths, interference: float = 0.0) -> Assumptions:
    """Returns what a run of this configuration would rest on; its steps are rollouts alone (`with_rest`)."""
    model = make_model(seconds)
    drafter, rollout = config.drafter, config.rollout
    spot = SpotSpeed(
        train=3 * seconds.plain / seconds.knee,
        recompute=seconds.plain / seconds.knee,
        max_passes=drafter.max_passes,
        tokens_per_micro_step=drafter.tokens_per_micro_step,
        carry_longest=drafter.carry_longest,
        change=_CHANGE / HORIZON,
    )
    return Assumptions(
        lengths=lengths,
        engines=[Measured(model, seconds)],
        agreement=Agreement(AGREEMENT, DEFAULT_CONFIDENCE_THRESHOLD),
        spot=spot,
        num_samples=rollout.samples_per_problem,
        max_batch_size=rollout.max_batch_size,
        max_tokens=config.sampling.max_tokens,
        prompt_tokens=256,
        read_seconds=seconds.plain / seconds.knee,
        other_seconds=[0.0],
        interference=interference,
        per_host=_PER_HOST,
        references_mib=rollout.references_mib,
        seed=config.run.seed,
        lines=(
            f"lengths: log-normal, half above {lengths.median:,.0f} tokens, one in twenty above {lengths.p95:,.0f}, cut at"
            f" {lengths.cap:,}; samples of one problem are no more alike than others",
            f"a plain step takes {1000 * seconds.plain:g} ms for up to {seconds.knee:g} tokens in the forward, beyond in"
            " proportion; a speculative one 1.42 + 0.067 depth + 0.0026 verified plain steps (arXiv 2511.16665, batch 1), its"
            " forward in proportion beyond as well; a reference costs no drafting",
            f"acceptance: as the paper reports it for Qwen2.5-32B, the same at all batch sizes; in chains {_CHAIN_RATE:g} a"
            " token",
            describe_agreement(AGREEMENT, "measured on the shipped model at learning rate 1e-4"),
            "drafter training: three forwards a token at full load; recomputing its features one;"
            f" {describe_change(_CHANGE / HORIZON)} (accept length 4.59 and 6.53 without and with it in the paper: taken"
            f" to be what {HORIZON} steps make)",
            f"idle work makes a busy replica's steps {interference:.0%} longer when all others of its host do some",
        ),
    )


def with_rest(assumed: Assumptions, seconds: float) -> Assumptions:
    """Returns the same with so many seconds of every step outside of the rollout."""
    line = f"a step outside of the rollout: {seconds:.1f} s, the same for any number of replicas"
    return replace(assumed, other_seconds=[seconds], lines=(*assumed.lines, line))


def describe_agreement(by_age: Mapping[int, Followed], source: str) -> str:
    """Returns a line for people."""
    ages = ", ".join(f"{one.first:,.0f} tokens {age} update{'s' if age > 1 else ''} later" for age, one in by_age.items())
    again = f"after a difference for {by_age[1].stretch:.0f} at a time"
    return f"references agree for {ages}, on average, and {again} ({source})"


def describe_change(change: float) -> str:
    """Returns what a step's training does to the drafter, for people."""
    return f"a step's training makes verifications {change:.1%} longer, whoever takes part"


def make_model(seconds: GpuSeconds) -> CostModel:
    """Returns a tuner that has measured these seconds and the paper's acceptance."""
    trees = [Strategy("learned", depth, _WIDTH, budget) for depth, budget in ACCEPT_LENGTHS]
    chains = [Strategy("learned", depth, 1, depth) for depth in _CHAINS]
    follows = [Strategy("ahead+learned", depth, 1, depth) for depth in _FOLLOWED]
    model = CostModel([Strategy.OFF, *chains, *trees, *follows], explores=False)
    for tree, accept_length in zip(trees, ACCEPT_LENGTHS.values(), strict=True):
        model.acceptance.observe(tree, _accepted(rate_of(accept_length, tree.depth), tree.depth), batch_size=1)
    model.acceptance.observe(chains[-1], _accepted(_CHAIN_RATE, chains[-1].depth), batch_size=1)
    for octave in range(8):
        batch = 2**octave
        for arm in model.arms:
            for nodes in (8, 16, 32, 64, 128, 256) if arm.follows else (arm.budget,):
                took = seconds(arm, nodes, batch, 1024)
                levels = arm.elsewhere.depth if arm.follows else arm.depth
                for _ in range(20):
                    model.costs.observe(Work(arm, batch, 1024, batch * (1 + nodes), levels), took)
    return model


def rate_of(accept_length: float, depth: int) -> float:
    """Returns the chance of a token, the same at every depth, with which a verification brings so many tokens: found by
    bisection, for the sum of its powers grows with it."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**d for d in range(depth + 1)) < accept_length else (low, rate)
    return low


def _accepted(rate: float, depth: int, num: int = 2000) -> list[int]:
    """Returns the accepted tokens of `num` verifications with just this rate."""
    survivors = [round(num * rate**d) for d in range(1, depth + 1)]
    return [sum(i < reached for reached in survivors) for i in range(num)]

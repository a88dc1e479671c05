"""Machines and drafters for tuners that know nothing yet: seconds by formula, noise by seed, time that is
only counted.

    tuner ─▶ arm ─▶ Machine: true seconds ─▶ counted             (what a run took, without luck)
                             observed seconds ─▶ the tuner        (with noise, outliers and slow first calls)

A tuner sees what an engine would show it. What it has cost is judged by the true seconds, so that
thousands of cold starts compare to a tenth of a percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tlt.base.strategy import Strategy
from tlt.speculation.tuner.expectation import Array
from tlt.speculation.tuner.protocol import (
    BatchState,
    PrefillTime,
    RunningSequence,
    ShadowDraft,
    StepOutcome,
    StrategyTuner,
)
from tlt.speculation.tuner.step_costs import CostPrior
from tlt.speculation.tuner.tuner import default_arms

PROMPT_TOKENS = 60
_NOISE = 0.1
"""Standard deviation of a step's log seconds."""
_OUTLIERS, _OUTLIER = 0.02, (2.0, 10.0)
"""The share of steps that somebody else's work disturbs, and the factors between which they then lie."""


@dataclass(frozen=True)
class Drafter:
    """rates: by kind, the chance of a drafted token if all before it are accepted.
    kinds: of strategies that exist.
    is_uneven: whether some texts are easy and others hard: the logarithm of a text's rate is the drafter's
        times an exponentially distributed factor.
    """

    rates: Mapping[str, float]
    is_uneven: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.rates)

    @property
    def arms(self) -> tuple[Strategy, ...]:
        return default_arms(self.kinds)

    def rate(self, arm: Strategy) -> float:
        """Returns the chance that one of `width` candidates is right."""
        return 0.0 if arm.is_off else 1 - (1 - self.rates[arm.drafter]) ** arm.width**0.5

    def tokens(self, arm: Strategy) -> float:
        """Returns the tokens that a verification brings on average."""
        return sum(self.rate(arm) ** d for d in range(arm.depth + 1))


DRAFTERS = {
    "good": Drafter({"learned": 0.78, "ngram": 0.05, "hybrid": 0.78}),
    "uneven": Drafter({"learned": 0.85, "ngram": 0.02, "hybrid": 0.85}, is_uneven=True),
    "fair": Drafter({"learned": 0.35, "ngram": 0.02, "hybrid": 0.35}),
    "useless": Drafter({"learned": 0.02, "ngram": 0.02, "hybrid": 0.03}),
    "none": Drafter({"ngram": 0.02}),
    "repeats": Drafter({"ngram": 0.8}),
}


@dataclass(frozen=True)
class Profile:
    """The seconds of a machine's work.

    forward: (rows, seconds) of the target, between which it is linear, and beyond the last two as between
        them.
    level: of a drafting step at one row.
    level_per_row: of each further one.
    retrieval: of a lookup, per sequence.
    first_call: what the first step of every new shape takes besides.
    read: of a token that a drafter has missed.
    """

    forward: tuple[tuple[float, float], ...]
    level: float
    level_per_row: float
    retrieval: float
    first_call: float
    read: float
    prior: CostPrior
    """What the tuner is told of model and drafter; a machine's seconds differ from it. Prompts are read
    with a head here."""

    def forward_seconds(self, rows: float) -> float:
        (r0, s0), (r1, s1) = self.forward[-2:]
        if rows >= r1:
            return s1 + (rows - r1) * (s1 - s0) / (r1 - r0)
        known, seconds = zip(*self.forward, strict=True)
        return float(np.interp(rows, list(known), list(seconds)))

    def seconds(self, arm: Strategy, batch_size: int) -> float:
        forward = self.forward_seconds(batch_size * (1 + arm.budget))
        retrieval = self.retrieval * batch_size if arm.drafter in ("ngram", "hybrid") else 0.0
        if arm.drafter not in ("learned", "hybrid"):
            return forward + retrieval
        rows = batch_size * (1 + (arm.width - 1) / 2)
        return forward + retrieval + arm.depth * (self.level + self.level_per_row * (rows - 1))


OLD_CPU_ROWS = ((1, 0.13), (4, 0.17), (16, 0.225), (17, 0.233))
"""Before linears were packed; a level cost a whole head then, as it does without a draft vocabulary."""
CPU_ROWS = ((1, 0.067), (4, 0.072), (16, 0.105), (17, 0.1103))
"""benchmarks/results/draft-vocabulary-chain.md has the levels of this machine."""
PROFILES = {
    "toy": Profile(
        ((1, 1.5e-3), (101, 7.5e-3)), 0.12e-3, 0.003e-3, 0.01e-3, 1e-3, 2e-6, CostPrior(0.062, 0.06, head=0)
    ),
    "0.5B": Profile(CPU_ROWS, 4.5e-3, 0.16e-3, 0.05e-3, 0.03, 0.35e-3, CostPrior(0.05, 0.04, head=0)),
    "0.5B, whole heads": Profile(
        OLD_CPU_ROWS, 0.055, 0.7e-3, 0.05e-3, 0.08, 0.35e-3, CostPrior(0.31, 0.04, head=0)
    ),
    "gpu": Profile(
        ((1, 5e-3), (128, 5e-3), (256, 10e-3)),
        0.6e-3,
        0.0,
        0.02e-3,
        10e-3,
        2e-6,
        CostPrior(0.11, 0.035, head=0),
    ),
}


@dataclass
class Machine:
    """A profile and a drafter at work. Time stands still but for `seconds`, which a caller may read."""

    profile: Profile
    drafter: Drafter
    seed: int = 0
    seconds: float = 0.0
    _shapes: set[tuple[int, Strategy]] = field(default_factory=set)
    _previous: Strategy = Strategy.OFF
    _missed: float = PROMPT_TOKENS

    def __post_init__(self) -> None:
        self.luck, self.noise = np.random.default_rng([self.seed, 0]), np.random.default_rng([self.seed, 1])

    def observed(self, seconds: float) -> float:
        """Counts these true seconds, and returns what a clock would say."""
        self.seconds += seconds
        disturbed = self.noise.uniform(*_OUTLIER) if self.noise.random() < _OUTLIERS else 1.0
        return seconds * disturbed * float(np.exp(self.noise.normal(0, _NOISE)))

    def read(self, num_texts: int) -> PrefillTime:
        """Reads the prompts; returns what is observed of it."""
        self._missed = PROMPT_TOKENS
        seconds = self.profile.forward_seconds(num_texts * PROMPT_TOKENS) + self.profile.first_call
        return PrefillTime(num_texts * PROMPT_TOKENS, 1, self.observed(seconds))

    def texts(self, num: int) -> Array:
        """Returns the factors of the logarithms of the rates of new texts."""
        return self.luck.exponential(size=num) if self.drafter.is_uneven else np.ones(num)

    def step(self, arm: Strategy, texts_B: Array) -> StepOutcome:
        batch_size = len(texts_B)
        seconds = self.profile.seconds(arm, batch_size)
        if (batch_size, arm) not in self._shapes:
            self._shapes.add((batch_size, arm))
            seconds += self.profile.first_call
        if arm.drafter in ("learned", "hybrid"):
            seconds += self.profile.read * self._missed * batch_size
            self._missed = 0
        else:
            self._missed += 1
        accepted = self.accepted(arm, texts_B)
        drafted = (arm.budget,) * len(accepted)
        return StepOutcome(batch_size + sum(accepted), accepted, drafted, self.observed(seconds))

    def accepted(self, arm: Strategy, texts_B: Array) -> tuple[int, ...]:
        if arm.is_off:
            return ()
        hazards_B = -np.log(max(self.drafter.rate(arm), 1e-9)) * texts_B
        walks = -np.log(self.luck.random(len(texts_B))) / hazards_B
        return tuple(np.minimum(walks.astype(int), arm.depth).tolist())

    def shadow_drafts(self, arm: Strategy) -> tuple[ShadowDraft, ...]:
        if arm.drafter in ("ngram", "hybrid"):
            return ()
        return tuple(
            ShadowDraft(15, accepted) for accepted in self.accepted(ShadowDraft.STRATEGY, np.ones(1))
        )


def run_batch(machine: Machine, tuner: StrategyTuner, batch_size: int, max_tokens: int) -> float:
    """Generates `batch_size` responses of `max_tokens` tokens, all from the start; returns the seconds
    that this took."""
    started = machine.seconds
    prefill_time: PrefillTime | None = machine.read(batch_size)
    left_B, texts_B, names_B = (
        np.full(batch_size, max_tokens),
        machine.texts(batch_size),
        np.arange(batch_size),
    )
    shadow_drafts: tuple[ShadowDraft, ...] = ()
    is_first = True
    while left_B.size:
        num = left_B.size
        length = PROMPT_TOKENS + max_tokens - float(left_B.mean())
        state = BatchState(num, length, 0, 0, num if is_first else 0, shadow_drafts=shadow_drafts)
        sequences = tuple(map(RunningSequence, names_B.tolist(), left_B.tolist()))
        batch = replace(state, num_left=float(left_B.mean()), prefill_time=prefill_time, sequences=sequences)
        arm, is_first, prefill_time = tuner.choose(batch), False, None
        outcome = machine.step(arm, texts_B)
        tuner.observe(arm, batch, replace(outcome, names=tuple(names_B.tolist())))
        shadow_drafts = machine.shadow_drafts(arm)
        left_B = left_B - 1 - np.array(outcome.accepted or (0,) * num)
        left_B, texts_B, names_B = (values_B[left_B > 0] for values_B in (left_B, texts_B, names_B))
    return machine.seconds - started


def settled_speed(
    machine: Machine, tuner: StrategyTuner, batch_size: int, after: float, num_steps: int
) -> float:
    """Returns the speed over the best arm's, by the true means, of `num_steps` steps after so many seconds
    of a batch that is always full; at the latest after `3 num_steps` steps."""
    drafter, profile = machine.drafter, machine.profile
    speeds = {
        arm: batch_size * drafter.tokens(arm) / profile.seconds(arm, batch_size) for arm in drafter.arms
    }
    prefill_time: PrefillTime | None = machine.read(batch_size)
    shadow_drafts: tuple[ShadowDraft, ...] = ()
    chosen: list[Strategy] = []
    since = None
    for step in range(4 * num_steps):
        if since is None and (machine.seconds > after or step >= 3 * num_steps):
            since = step
        num_admitted = batch_size if prefill_time is not None else 0
        batch = BatchState(
            batch_size, 500.0, 0, 0, num_admitted, shadow_drafts=shadow_drafts, prefill_time=prefill_time
        )
        arm, prefill_time = tuner.choose(batch), None
        tuner.observe(arm, batch, machine.step(arm, machine.texts(batch_size)))
        shadow_drafts = machine.shadow_drafts(arm)
        chosen.append(arm)
        if since is not None and step >= since + num_steps:
            break
    return _speed_of(chosen[since:], drafter, profile, batch_size) / max(speeds.values())


def _speed_of(chosen: Sequence[Strategy], drafter: Drafter, profile: Profile, batch_size: int) -> float:
    tokens = sum(drafter.tokens(arm) for arm in chosen)
    return batch_size * tokens / sum(profile.seconds(arm, batch_size) for arm in chosen)


def best_fixed(profile: Profile, drafter: Drafter, batch_size: int) -> Strategy:
    """Returns the arm that brings the most tokens a second on average."""
    return max(drafter.arms, key=lambda arm: drafter.tokens(arm) / profile.seconds(arm, batch_size))

"""Computes the seconds of a step with any number of replicas, from lengths, step costs and acceptance.

    alive
      3 ┤▇▇▇▇                       responses of 2, 5 and 9 tokens
      2 ┤▇▇▇▇▇▇▇▇▇▇
      1 ┤▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇         rollout seconds = Σ tokens x pace(responses of a replica)
        └───2─────5───────9▶ tokens

    pace = seconds of an engine step / tokens per verification, of the arm that makes it least

Replicas that hand responses over have equally many alive, and some are idle when fewer are alive than there
are replicas. Without handing over, a replica decodes its own problems, then is idle until the longest has
ended.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import NormalDist, fmean

from tlt.config.schema import Config

Pace = Callable[[int, float, bool], float]
"""(responses of a replica, their mean length, whether it may draft) → seconds in which each gains a token."""
Groups = Sequence[Sequence[int]]
"""Lengths of a step's responses in tokens, those to one problem together."""

OFF, ALONE, TLT = "off", "TLT without hand-over", "TLT"
GENERAL = (
    "replicas that hand responses over have equally many at any time, and handing over takes no time",
    "without handing over, problems are dealt out in turn",
    "all responses of a batch grow alike; nothing is tried out or generated ahead, no drafter gets better",
)
"""Assumptions of every expectation, for people."""


@dataclass(frozen=True)
class RolloutTime:
    """The seconds of a rollout to its last token, and the replicas' idle seconds until then, summed."""

    seconds: float
    idle_seconds: float


def share(lengths: Sequence[int], num_replicas: int, width: int, pace: Pace, may_draft: bool) -> RolloutTime:
    """Returns the rollout of replicas that hand responses over. width: responses that a replica decodes at
    once."""
    waiting = deque(lengths)
    alive: list[tuple[int, int]] = []
    """(end, begin) of each response, in tokens that a response alive throughout has gained."""
    place = sum_begun = 0
    seconds = idle = 0.0
    while waiting or alive:
        while waiting and len(alive) < num_replicas * width:
            heapq.heappush(alive, (place + waiting.popleft(), place))
            sum_begun += place
        num, (end, begun) = len(alive), alive[0]
        if end > place:
            mean_length = (place + end) / 2 - sum_begun / num
            took = (end - place) * pace(math.ceil(num / num_replicas), mean_length, may_draft)
            seconds += took
            idle += took * max(num_replicas - num, 0)
        place = end
        sum_begun -= begun
        heapq.heappop(alive)
    return RolloutTime(seconds, idle)


def keep(groups: Groups, num_replicas: int, width: int, pace: Pace, may_draft: bool) -> RolloutTime:
    """Returns the rollout of replicas that keep the problems dealt to them."""
    dealt = [list(chain(*groups[index::num_replicas])) for index in range(num_replicas)]
    seconds = [share(lengths, 1, width, pace, may_draft).seconds for lengths in dealt]
    return RolloutTime(max(seconds), sum(max(seconds) - own for own in seconds))


def log_normal(median: float, p95: float, cap: int, num: int = 4096) -> list[int]:
    """Returns long-tailed lengths: half above `median`, one in twenty above `p95`, but none above `cap`."""
    place_of = NormalDist().inv_cdf
    powers = (place_of((i + 0.5) / num) / place_of(0.95) for i in range(num))
    return [min(max(round(median * (p95 / median) ** power), 1), cap) for power in powers]


def draw_steps(known: Sequence[Groups], size: tuple[int, int], num_steps: int, seed: int) -> list[Groups]:
    """Returns the lengths of steps of a size (problems, samples of each): known steps of this size, else
    steps of problems drawn from all known ones, with responses drawn from each."""
    num_problems, num_samples = size
    if same := [step for step in known if [len(group) for group in step] == [num_samples] * num_problems]:
        return same[:num_steps]
    rng, problems = random.Random(seed), list(chain(*known))
    drawn = (rng.choices(problems, k=num_problems) for _ in range(num_steps))
    return [[rng.choices(one, k=num_samples) for one in step] for step in drawn]


# ── what is expected ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Errors:
    """Measured over computed seconds of rollouts: of all together, of quick and of slow steps."""

    mean: float = 1.0
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True)
class Assumed:
    """The assumptions of an expectation.

    steps: known lengths.
    width: responses that a replica decodes at a time.
    off: errors without drafts; None: unknown.
    tlt: errors with drafts.
    other_seconds: of a step outside of the rollout.
    lines: the assumptions for people, besides GENERAL.
    source: whose acceptance and costs the factors are of, for people.
    """

    steps: Sequence[Groups]
    pace: Pace
    num_samples: int
    width: int
    off: Errors | None
    tlt: Errors
    other_seconds: float
    lines: tuple[str, ...]
    source: str
    seed: int = 0


@dataclass(frozen=True)
class Expected:
    """A variant's mean step, and the range of its steps' seconds.

    times: the row's first variant's seconds over this one's, between times_low and times_high.
    """

    variant: str
    seconds: float
    low: float
    high: float
    rollout_seconds: float
    idle_seconds: float
    times: float = 1.0
    times_low: float = 1.0
    times_high: float = 1.0

    def beside(self, first: Expected) -> Expected:
        """Returns the same with its speed-up over `first`. Drafted variants are slow together; off may be
        quick where they are slow."""
        least, most = (first.low, first.high) if first.variant == OFF else (first.high, first.low)
        low, high = sorted((least / self.high, most / self.low))
        return replace(self, times=first.seconds / self.seconds, times_low=low, times_high=high)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    num_replicas: replicas that share a step.
    num_steps: steps whose mean is given.
    """

    num_replicas: int
    num_responses: int
    num_steps: int
    variants: tuple[Expected, ...]


def expect(assumed: Assumed, num_replicas: int, num_problems: int, num_steps: int) -> Row:
    """Returns the table's row for replicas that share `num_problems` a step."""
    steps = draw_steps(assumed.steps, (num_problems, assumed.num_samples), num_steps, assumed.seed)
    how = num_replicas, assumed.width, assumed.pace

    def variant(name: str, rollouts: Sequence[RolloutTime], errors: Errors) -> Expected:
        rollout, idle = fmean(one.seconds for one in rollouts), fmean(one.idle_seconds for one in rollouts)
        by = errors.mean, errors.low, errors.high
        mean, low, high = (rollout * error + assumed.other_seconds for error in by)
        return Expected(name, mean, low, high, rollout * errors.mean, idle * errors.mean)

    shared = [list(chain(*groups)) for groups in steps]
    found = []
    if assumed.off is not None:
        found.append(variant(OFF, [share(lengths, *how, False) for lengths in shared], assumed.off))
    found.append(variant(ALONE, [keep(groups, *how, True) for groups in steps], assumed.tlt))
    found.append(variant(TLT, [share(lengths, *how, True) for lengths in shared], assumed.tlt))
    variants = found[0], *(one.beside(found[0]) for one in found[1:])
    return Row(num_replicas, num_problems * assumed.num_samples, len(steps), variants)


# ── a GPU that has not been measured ────────────────────────────────────────────────────────────────────────

ACCEPT_LENGTHS = {(8, 16): 6.34, (12, 32): 8.05, (12, 64): 8.76}
"""(depth, tokens verified) → tokens per verification: Qwen2.5-32B with a trained drafter, candidates of 8
(arXiv 2511.16665, as third parties quote it)."""
_KEPT = 0.8
"""Probability that a token of a drafter's chain is kept if all before it are."""
_ARMS = {(depth, depth): sum(_KEPT**d for d in range(depth + 1)) for depth in (1, 2, 4, 8)} | ACCEPT_LENGTHS
_DRAFTING, _PER_DEPTH, _PER_VERIFIED = 0.42, 0.067, 0.0026
PAPER_ERRORS = Errors(mean=1.0, low=1.0, high=1.8)
"""Drafted rollouts in the paper's table take up to 1.8 times the computed seconds
(benchmarks/results/plan-speed.md)."""


@dataclass(frozen=True)
class GpuPace:
    """The pace of a GPU.

    plain: seconds of a step without drafts.
    knee: tokens in one forward up to which its time is constant; beyond, it grows in proportion.
    """

    plain: float
    knee: float

    def __call__(self, num: int, mean_length: float, may_draft: bool) -> float:
        arms = {(0, 0): 1.0} | (_ARMS if may_draft else {})
        return min(self.seconds(*arm, num) / num_tokens for arm, num_tokens in arms.items())

    def seconds(self, depth: int, verified: int, num: int) -> float:
        """Returns the seconds of a step that verifies `verified` drafts of each of `num` responses."""
        load = max(num * (1 + verified) / self.knee, 1.0)
        drafting = _DRAFTING + _PER_DEPTH * depth if depth else 0.0
        return self.plain * (drafting + (1 + _PER_VERIFIED * verified) * load)


def assume_gpu(config: Config, pace: GpuPace, median: float, p95: float) -> Assumed:
    """Returns the assumptions about this configuration's steps: rollouts alone; `with_rest` adds the rest."""
    cap = config.sampling.max_tokens
    return Assumed(
        steps=[[log_normal(median, p95, cap)]],
        pace=pace,
        num_samples=config.rollout.samples_per_problem,
        width=config.rollout.max_batch_size,
        off=Errors(),
        tlt=PAPER_ERRORS,
        other_seconds=0.0,
        lines=(
            f"lengths: log-normal, half above {median:,.0f} tokens, one in twenty above {p95:,.0f}, cut at"
            f" {cap:,}; samples of one problem are no more alike than others",
            f"a plain step takes {1000 * pace.plain:g} ms up to {pace.knee:g} tokens in the forward, then in"
            f" proportion; with a draft {1 + _DRAFTING} + {_PER_DEPTH} depth + {_PER_VERIFIED} verified plain"
            " steps (arXiv 2511.16665, batch 1), its forward in proportion then as well",
            f"acceptance: of the paper's Qwen2.5-32B, the same at all batch sizes; in chains {_KEPT} a token",
            f"the range: with drafts up to {PAPER_ERRORS.high} times as long, as in the paper's table",
        ),
        source="Qwen2.5-32B and its drafter (arXiv 2511.16665), not of your model; give --run for yours",
        seed=config.run.seed,
    )


def with_rest(assumed: Assumed, seconds: float) -> Assumed:
    """Returns the same with `seconds` of every step outside of the rollout."""
    line = f"a step outside of the rollout: {seconds:.2f} s on average, the same for any number of replicas"
    return replace(assumed, other_seconds=seconds, lines=(*assumed.lines, line))

"""Whether an arm is worth a trial, by its expected speed and its uncertainty.

    loss(arm)   the seconds that TRIALS steps of it take more than the best arm takes for as many tokens, and
                the extra seconds of its first step
    gain(arm)   the expected seconds that the arm then saves of the time left; outcomes where it is slower
                count as 0, because the best arm then goes on

Of the arms with gain > loss, the smallest loss is tried. An arm not expected to be clearly faster must not
lose more than MOST_LOST of the time left. This is the knowledge gradient for correlated beliefs (Frazier,
Powell and Dayanik, 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.base.strategy import Strategy

TRIALS = 2.0
"""Steps of a trial, besides the extra seconds of the first."""
CAUTION = 0.7
"""Standard deviations by which speculation is rated below its expected speed."""
CLEARLY, MOST_LOST = 1.1, 0.02
"""An arm on trial is expected this many times as fast, or to lose less than this share of the time left."""


@dataclass(frozen=True)
class Prediction:
    strategy: Strategy
    now: float
    """Tokens per second of the whole batch."""
    speed: float
    """Tokens per second until all sequences have ended."""
    low: float
    """`speed` less CAUTION standard deviations."""
    sd_vs_off: float
    """Standard deviation of log(speed / off's speed)."""
    sd_learned_by_trial: float
    """Standard deviation of a trial's change of log(speed / the best arm's speed)."""
    seconds: float
    once: float
    """Extra seconds of the next step."""


def find_trial(predictions: Sequence[Prediction], best: Prediction, num_left: float) -> Prediction | None:
    seconds_left = num_left / best.low
    found, smallest = None, math.inf
    for one in predictions:
        if one is best or one.sd_learned_by_trial == 0.0:
            continue
        loss = one.once + TRIALS * one.seconds * (1 - one.low / best.low)
        # Variance today = that of the estimate after a trial + what is left then (law of total variance).
        # If the arm is known within 0.25, and a trial moves the estimate by 0.20, then it is known within
        # sqrt(0.25² - 0.20²) = 0.15, by which CAUTION still lowers it. One deviation is about off, the other
        # about the best arm: an approximation unless off is the best.
        sd_left = math.sqrt(max(one.sd_vs_off**2 - one.sd_learned_by_trial**2, 0.0))
        expected_lead = math.log(one.speed / best.low) - CAUTION * sd_left
        gain = seconds_left * expected_saving(expected_lead, one.sd_learned_by_trial)
        may_lose = one.speed > CLEARLY * best.low or loss < MOST_LOST * seconds_left
        if gain > loss and may_lose and loss < smallest:
            found, smallest = one, loss
    return found


def expected_saving(mean: float, deviation: float) -> float:
    """Returns E[max(0, 1 - exp(-x))] for normal x = log(an arm's speed / the best arm's): the share of time
    saved if the arm is used only where it turns out faster."""
    place = mean / deviation
    below = -deviation + place
    return _normal(place) - math.exp(deviation**2 / 2 - mean) * _normal(below)


def _normal(place: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * math.erfc(-place / math.sqrt(2))

"""What each use of idle time is worth, and the plan that follows from it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tlt.base.records import IdleUse
from tlt.training.idle import choice as module
from tlt.training.idle.choice import IdleChoice, IdleFacts
from tlt.training.idle.slowdown import SlowdownSums

AHEAD, TRAIN = IdleUse.AHEAD, IdleUse.TRAIN
NOTHING = IdleFacts(0, 0.0, 0, 0.0, 10.0, 1.5, 0.0, 0.0, math.nan, math.nan, 50)
GENERATED = replace(NOTHING, ahead_tokens=10_000, ahead_seconds=10.0, offered_tokens=10_000)
NO_SUMS = SlowdownSums.zero()


def choice(*uses: IdleUse, compares: bool = True) -> IdleChoice:
    return IdleChoice(uses or (AHEAD, TRAIN), compares, has_neighbours=True)


def costly(use: IdleUse, cost: float, num_steps: int = 3000) -> SlowdownSums:
    """What a regression over so many steps says where this use costs so much."""
    share = np.array([float(use is AHEAD), float(use is TRAIN)])
    xx, noise = num_steps / 4 * np.outer(share, share), 0.2
    return SlowdownSums(
        xx, cost * num_steps / 4 * share, num_steps * noise**2 + cost**2 * num_steps / 4, float(num_steps)
    )


def test_ahead_is_worth_what_its_tokens_have_won_shared_by_the_ranks_at_work() -> None:
    chosen = choice()
    for _ in range(40):
        chosen.observe(replace(GENERATED, won_seconds=6.0), NO_SUMS)
    # a second brings 1,000 tokens, and 1,000 tokens that were offered have won 0.6 s; 1.5 ranks are at work
    assert chosen.worth()[AHEAD].gain == pytest.approx(0.6 / 1.5, rel=0.02)
    idle = replace(NOTHING, rollout_seconds=10.0)
    before = chosen.worth()[AHEAD].gain
    for _ in range(20):
        chosen.observe(idle, NO_SUMS)
    assert chosen.worth()[AHEAD].gain == pytest.approx(before), (
        "what is not done teaches nothing, and is not forgotten either"
    )


def test_the_use_that_is_worth_more_comes_first_and_the_other_has_its_trials() -> None:
    chosen = choice()
    for _ in range(10):
        chosen.observe(
            replace(GENERATED, won_seconds=9.0, train_seconds=5.0, acceptance_before=0.5, acceptance=0.501),
            NO_SUMS,
        )
    plans = [chosen.plan(step).order for step in range(module.TRIAL_EVERY)]
    assert plans[0] == (TRAIN, AHEAD)
    assert plans[1:] == [(AHEAD, TRAIN)] * (module.TRIAL_EVERY - 1)


def test_a_use_that_costs_more_than_it_brings_is_left_but_for_trials() -> None:
    chosen = choice(TRAIN, compares=False)
    facts = replace(NOTHING, train_seconds=5.0, acceptance_before=0.5, acceptance=0.5)
    for _ in range(10):
        chosen.observe(facts, costly(TRAIN, 0.25))
    assert chosen.worth()[TRAIN].cost == pytest.approx(0.25, abs=0.02)
    assert chosen.worth()[TRAIN].gain < 0.25
    orders = [chosen.plan(step).order for step in range(2 * module.TRIAL_EVERY)]
    assert orders.count(()) == 2 * module.TRIAL_EVERY - 2
    assert orders.count((TRAIN,)) == 2


def test_generating_ahead_is_done_where_the_user_asked_for_it_whatever_it_costs() -> None:
    asked, compared = choice(compares=False), choice()
    for chosen in (asked, compared):
        for _ in range(10):
            chosen.observe(replace(GENERATED, won_seconds=-0.5), costly(AHEAD, 0.3))
    assert asked.plan(0).order[0] is AHEAD
    assert AHEAD not in compared.plan(1).order


def test_what_is_known_survives_a_restart() -> None:
    chosen, again = choice(), choice()
    facts = replace(GENERATED, won_seconds=7.0, train_seconds=1.0, acceptance_before=0.6, acceptance=0.61)
    chosen.observe(facts, costly(AHEAD, 0.2))
    again.restore(json.loads(json.dumps(chosen.counters())))
    assert again.worth() == chosen.worth()
    assert again.plan(3) == chosen.plan(3)

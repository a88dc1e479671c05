"""The queue: its order, the tokens that are expected of it, and that an engine step costs the same however long it
is."""

from __future__ import annotations

import random
import sys
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.lossless.helpers import make_engine, make_policy
from tlt.base.strategy import Strategy
from tlt.base.types import Request, SamplingParams
from tlt.engine.lengths import Lengths
from tlt.engine.sequence import Sequence
from tlt.engine.waiting import Waiting
from tlt.speculation.tuner.tuner import Fixed

POLICY = make_policy()


def asked(index: int, max_tokens: int) -> Request:
    return Request("p", index, (1, 2, 3), SamplingParams(max_tokens=max_tokens))


def running(num_tokens: int, num_left: int) -> Sequence:
    return cast("Sequence", SimpleNamespace(num_tokens=num_tokens, num_left=num_left))


def test_the_expected_tokens_of_a_queue_are_the_sum_over_its_requests() -> None:
    rng, queue, kept, lengths = random.Random(0), Waiting(), deque[Request](), Lengths()
    for index in range(2000):
        one, move = asked(index, rng.choice((1, 7, 30, 500, 2048))), rng.randrange(8)
        if move < 4:
            queue.extend([one] * move)
            kept.extend([one] * move)
        elif move == 4:
            queue.put_first(one)
            kept.appendleft(one)
        elif move == 5 and kept:
            assert queue.take_first() is kept.popleft()
        elif move == 6 and kept:
            assert queue.take_last() is kept.pop()
        elif index % 500 == 499:
            queue.clear()
            kept.clear()
        if move == 7:
            lengths.note_ended(running(rng.randint(1, 900), 0))
        assert [*queue] == [*kept]
        assert len(queue) == len(kept)
        assert lengths.waiting(queue.num_by_limit) == pytest.approx(
            sum(min(one.params.max_tokens, lengths._expected) for one in kept)
        )


def test_a_response_is_expected_to_be_as_long_as_the_latest_and_a_longer_one_to_double() -> None:
    lengths = Lengths()
    assert lengths.left(running(5, 100)) == 100, "none has ended: all that it may have"
    lengths.note_ended(running(64, 0))
    assert lengths.left(running(5, 100)) == 64 - 5
    assert lengths.left(running(60, 100)) == 60, "nearly as long, or longer: as much again"
    assert lengths.left(running(80, 100)) == 80
    assert lengths.left(running(80, 10)) == 10, "never more than it may have"
    lengths.note_ended(running(0, 0))
    assert lengths.left(running(5, 100)) == pytest.approx(64 - 64 / 32 - 5)
    assert lengths.waiting({1: 2, 1000: 3}) == pytest.approx(2 + 3 * 62)


@pytest.mark.parametrize("arm", ["off", "learned:2x1x2", "ngram:2x1x2"])
def test_a_step_costs_the_host_the_same_however_many_requests_wait(arm: str) -> None:
    def calls_of_a_step(num_waiting: int, num_limits: int) -> int:
        engine = make_engine(POLICY, Fixed(Strategy.parse(arm)), max_batch_size=2)
        engine.add(asked(index, 50 + index % num_limits) for index in range(2 + num_waiting))
        engine.step()
        engine.step()
        num_calls = 0

        def count(*event: Any) -> None:
            nonlocal num_calls
            num_calls += 1

        sys.setprofile(count)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        return num_calls

    assert calls_of_a_step(3000, 1) <= calls_of_a_step(8, 1) + 20
    assert calls_of_a_step(3000, 20) <= calls_of_a_step(8, 1) + 10 * 20

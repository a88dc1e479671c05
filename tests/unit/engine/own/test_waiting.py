"""An engine step costs the same however long the queue is."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.lossless.helpers import make_engine, make_policy
from tlt.base.strategy import Strategy
from tlt.base.types import Request, SamplingParams
from tlt.speculation.tuner.tuner import FixedTuner

POLICY = make_policy()


def asked(index: int, max_tokens: int) -> Request:
    return Request("p", index, (1, 2, 3), SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize("arm", ["off", "learned:2x1x2", "ngram:2x1x2"])
def test_a_step_costs_the_host_the_same_however_many_requests_wait(arm: str) -> None:
    """Counted in calls of Python: nothing may look at every waiting request."""

    def calls_of_a_step(num_waiting: int) -> int:
        engine = make_engine(POLICY, FixedTuner(Strategy.parse(arm)), max_batch_size=2)
        engine.add(asked(index, 50 + index % 20) for index in range(2 + num_waiting))
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

    assert calls_of_a_step(3000) <= calls_of_a_step(8) + 20

"""A drafter that does not run while nothing is drafted, in the model runner of GPUs, against vLLM's own, which
runs in every step: the same drafts afterwards. test_unread.py asks the first runner the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.asleep import Case, Found, run_asleep
from tests.vllm.parts import DRAFTER, in_vllm
from tests.vllm.test_live import countdown

pytestmark = in_vllm

CASES = {
    "off at first": Case(9, 4),
    "off at first, three positions kept": Case(9, 4, room=3),
    "off at first, short passes": Case(9, 4, longest_pass=6),
    "put back while off": Case(9, 4, preempts_at=7),
    "prompts that come while off": Case(5, 3),
    "the host is ahead": Case(5, 3, is_ahead=True),
    "another length in every step": Case(0, 0),
    "another length in every step, three positions kept": Case(0, 0, room=3, is_ahead=True),
}
FAULTS = {
    "one position off": Case(9, 4, fault="one position off"),
    "never read": Case(9, 4, fault="never read"),
    "tables of the pass left": Case(9, 4, fault="tables of the pass left"),
    "a slot's past kept": Case(9, 4, fault="a slot's past kept"),
    "rejected drafts kept": Case(0, 0, fault="rejected drafts kept"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Six requests, three at a time, that end one after another: slots change hands."""
    requests = [
        replace(one, params=replace(one.params, max_tokens=9 + 7 * (index % 3)))
        for index, one in enumerate(countdown(6, 24))
    ]
    cases = CASES | FAULTS
    done = run_asleep(requests, [*cases.values()], DRAFTER, 3, tmp_path_factory.mktemp("asleep"))
    return dict(zip(cases, done, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_a_drafter_that_ran_in_every_step(found: dict[str, Found], name: str) -> None:
    assert len(found[name].expected) > 15
    assert found[name].drafts == found[name].expected


@pytest.mark.parametrize("name", FAULTS)
def test_a_drafter_that_read_something_else_drafts_something_else(found: dict[str, Found], name: str) -> None:
    assert found[name].drafts != found[name].expected


def test_while_nothing_is_drafted_the_drafter_reads_prompts_alone(found: dict[str, Found]) -> None:
    steps: list[Any] = list(zip(found["off at first"].lengths, found["off at first"].passes, strict=True))
    assert len(steps[0][1]) == 1  # the prompts
    assert steps[1:9] == [(0, ())] * 8
    assert steps[9][1][0] == 2 * 8, "what was unread of two; the third has ended"
    assert len(steps[9][1]) == 1 + 4
    assert len(steps[10][1]) == 4


def test_a_step_drafts_as_many_tokens_as_it_is_told(found: dict[str, Found]) -> None:
    told = found["another length in every step"]
    steps = zip(told.lengths, told.passes, strict=True)
    assert {len(passes) - length for length, passes in steps if length} <= {0, 1}

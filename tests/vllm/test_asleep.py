"""A drafter that does not run while nothing is drafted, in the model runner of GPUs, against vLLM's own, which
runs in every step: the same drafts afterwards. test_unread.py asks the first runner the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.asleep import Case, Found, of_a_schedule, of_cases
from tests.vllm.children import in_child
from tests.vllm.parts import BASE, DRAFTER, in_vllm, make_drafter
from tests.vllm.serving import export_eagle
from tests.vllm.test_live import countdown

pytestmark = in_vllm

CASES = {
    "off at first": Case(9, 4),
    "off at first, three positions kept": Case(9, 4, room=3),
    "off at first, short passes": Case(9, 4, longest_pass=6),
    "put back while off": Case(9, 4, preempts_at=7),
    "prompts that come while off": Case(20, 4),
    "drafts in every third step": Case(2, 1),
    "another length in every step": Case(0, 0),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Six requests, three at a time, that end one after another: slots change hands."""
    requests = [
        replace(one, params=replace(one.params, max_tokens=9 + 7 * (index % 3)))
        for index, one in enumerate(countdown(6, 24))
    ]
    folder = tmp_path_factory.mktemp("asleep")
    done = in_child(folder, of_cases, requests, [*CASES.values()], DRAFTER, 3)
    return dict(zip(CASES, done, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_a_drafter_that_ran_in_every_step(found: dict[str, Found], name: str) -> None:
    assert len(found[name].expected) > 5
    assert found[name].drafts == found[name].expected


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


def test_a_host_that_is_ahead_of_the_device_need_not_know_positions(tmp_path: Path) -> None:
    export_eagle(tmp_path, DRAFTER, BASE)
    prompts, max_tokens = [[5, 6, 7, 8, 9], [4, 5, 6], [9, 8, 7, 6], [3, 4, 5, 6, 7, 8]], [10, 30, 12, 20]
    awake, asleep = in_child(tmp_path, of_a_schedule, prompts, max_tokens, tmp_path / "eagle")
    assert asleep.ahead > 0
    assert asleep.drafts == awake.drafts
    assert len(awake.drafts) > 10
    assert all(awake.passes)
    assert len([passes for passes in asleep.passes if not passes]) > 10


def test_a_drafter_that_reads_three_layers_misses_nothing_either(tmp_path: Path) -> None:
    folder = make_drafter(BASE, tmp_path / "eagle3", "eagle3")
    (found,) = in_child(tmp_path, of_cases, countdown(3, 12), [Case(4, 2)], folder, 2)
    assert found.drafts == found.expected
    assert () in found.passes

"""A drafter that does not run while nothing is drafted, against vLLM's own, which runs in every step: the same
drafts afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, repeat
from typing import Any

import pytest

from tests.side_by_side import random_lengths
from tests.vllm.parts import in_vllm
from tests.vllm.test_live import countdown
from tlt.base.types import Request

pytestmark = in_vllm

Drafts = dict[tuple[str, int], tuple[int, ...]]
"""By problem and number of tokens before the draft."""


def runner_of(live: Any) -> Any:
    return live.link._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def bytes_per_position(runner: Any) -> int:
    width = runner.model_config.get_hidden_size()
    return runner.max_num_reqs * width * 4


def drafts_of(live: Any, requests: Sequence[Request], lengths: Iterator[int]) -> Drafts:
    """Returns what every step verified, where each has the next of these lengths drafted."""
    tuner, live.tuner = live.tuner, None
    scheduler, found = live.link._scheduler, {}
    live.add(requests)
    while not live.is_idle:
        for name, sequence in live._running.items():
            draft = tuple(scheduler.requests[live.link._internal_ids[name]].spec_token_ids)
            found[sequence.request.problem_id, len(sequence.tokens)] = draft
        live.link.draft(next(lengths))
        live.step()
    live.tuner = tuner
    return found


@pytest.fixture
def passes(live: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The draft length of every pass of the drafter."""
    drafter, found = runner_of(live).drafter, list[int]()
    propose = drafter.propose

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(kwargs["num_speculative_tokens"])
        return propose(*args, **kwargs)

    monkeypatch.setattr(drafter, "propose", counted)
    return found


def pattern(off: int, on: int) -> Iterator[int]:
    """Yields `off` steps without drafts, `on` steps with four, and so on."""
    return (0 if step % (off + on) < off else 4 for step in count())


LENGTHS: dict[str, Callable[[], Iterator[int]]] = {
    "off at first": lambda: pattern(30, 10**6),
    "off for nine steps of twelve": lambda: pattern(9, 3),
    "another length in every step": lambda: random_lengths(4, 3),
}


@pytest.mark.parametrize("room", ["ample", "three positions", "short passes"])
@pytest.mark.parametrize("when", LENGTHS)
def test_drafts_are_those_of_a_drafter_that_ran_in_every_step(
    live: Any, monkeypatch: pytest.MonkeyPatch, when: str, room: str
) -> None:
    """More requests than run at a time: some read their prompts while the drafter is behind others."""
    from tlt.engine.vllm.inside import unread  # imports vLLM

    requests = countdown(20, 60)
    with monkeypatch.context() as patch:
        patch.setattr(unread.UnreadPositions, "must_run", lambda *_: True)
        patch.setattr(unread.UnreadPositions, "store", lambda *_: None)
        expected = drafts_of(live, requests, LENGTHS[when]())
    runner = runner_of(live)
    if room == "three positions":
        monkeypatch.setattr(unread, "KEPT_BYTES", 3 * bytes_per_position(runner))
    if room == "short passes":
        monkeypatch.setattr(runner.tlt.unread, "longest_pass", 40)
    monkeypatch.setattr(runner.tlt.unread, "kept_SRF", None)
    found = drafts_of(live, requests, LENGTHS[when]())
    assert sum(map(bool, found.values())) > 40
    assert found == expected


def test_while_nothing_is_drafted_the_drafter_reads_prompts_alone(live: Any, passes: list[int]) -> None:
    drafts_of(live, countdown(8, 60), repeat(0))
    assert passes == [0]
    passes.clear()
    drafts_of(live, countdown(8, 60), pattern(20, 10**6))
    assert passes[:3] == [0, 0, 4]  # the prompts, what was unread, the drafts
    assert set(passes[3:]) == {4}

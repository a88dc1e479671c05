"""Generating ahead: who is given what, when it stops, and what all ranks know of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.lossless.helpers import VOCAB, make_engine, make_policy
from tlt.accounts import AheadReport
from tlt.cli.generate import Generate, check_references
from tlt.config.load import load_config
from tlt.distributed.ahead_queue import AheadQueue
from tlt.distributed.world import World
from tlt.drafter.references import REPLAY, References
from tlt.training.ahead import AheadOfPolicy
from tlt.types import Request, SamplingParams, UserError

WORLD = World(0, 1, 0, torch.device("cpu"), HashStore(), None)
PARAMS = SamplingParams(1.0, max_tokens=24, seed=3)


def request(problem: str, step: int = 1, sample: int = 0) -> Request:
    return Request(problem, sample, (9, 11, ord(problem[-1]) % VOCAB), PARAMS, "rollout", step)


def after(num: int) -> Callable[[], bool]:
    """Says stop when it has been asked so many times."""
    asked = iter(range(num))
    return lambda: next(asked, None) is None


def make_ahead(requests: list[Request], **changes: Any) -> AheadOfPolicy:
    given = {"engine": make_engine(make_policy()), "references": References(), "past": [], "lengths": {}, "world": WORLD}
    given |= changes
    ahead = AheadOfPolicy(requests=requests, **given)
    ahead.begin(queue_of())
    return ahead


def queue_of(store: HashStore | None = None) -> AheadQueue:
    return AheadQueue(store or HashStore())


def plain(requests: list[Request]) -> dict[tuple[int, int, int, int], tuple[int, ...]]:
    by_name = {(r.problem_id, r.sample_index): r.key for r in requests}
    rollouts = make_engine(make_policy()).generate(requests)
    return {by_name[r.problem_id, r.sample_index]: r.token_ids for r in rollouts}


def test_what_was_generated_ahead_is_what_the_policy_says_and_all_of_it_becomes_references() -> None:
    requests = [request(f"p{i}") for i in range(10)]
    references = References()
    ahead = make_ahead(requests, references=references)
    report = ahead.run(lambda: False)
    assert report.num_tokens == sum(map(len, plain(requests).values()))
    ahead.end()
    for key, token_ids in plain(requests).items():
        kept = references.get(key)
        assert kept is not None
        assert tuple(kept.token_ids) == token_ids


def test_a_session_ends_within_a_step_leaves_the_engine_idle_and_the_next_goes_on() -> None:
    requests = [request(f"p{i}") for i in range(3)]
    engine = make_engine(make_policy())
    engine.stats.num_tokens = 17
    ahead = make_ahead(requests, engine=engine)
    first = ahead.run(after(5))
    assert first.num_steps == 5
    assert engine.is_idle
    assert engine.stats.num_tokens == 17, "a phase's own account"
    assert sorted(len(token_ids) for token_ids in ahead.found.values()) == [4, 5, 5], "two at first, then the third"
    second = ahead.run(lambda: False)
    assert first.num_tokens + second.num_tokens == sum(map(len, plain(requests).values()))
    assert ahead.found == plain(requests)
    assert ahead.run(lambda: False) == AheadReport(), "nothing is left"


def test_two_replicas_share_the_requests_of_a_step_and_one_does_what_the_other_has_begun_and_left() -> None:
    requests, store = [request(f"p{i}") for i in range(8)], HashStore()
    replicas = []
    for replica in range(2):
        ahead = make_ahead(requests, world=World(replica, 2, replica, torch.device("cpu"), store, None))
        ahead.begin(queue_of(store))
        replicas.append(ahead)
    for ahead in replicas:
        ahead.run(after(2))  # takes a lot of two, another one, and is called away
    assert [len(ahead.found) for ahead in replicas] == [4, 4]
    assert not replicas[0].found.keys() & replicas[1].found.keys()
    replicas[1].run(lambda: False)
    assert replicas[1].found == plain(requests), "the first one is busy, and its four are done here"
    replicas[0].run(lambda: False)
    assert replicas[0].found.keys() == {requests[i].key for i in range(4)}, "and what the other has done is not done again"


def test_the_next_step_comes_before_the_one_behind_it_and_the_longest_problems_first() -> None:
    requests = [request("a", 2), request("b", 1), request("c", 1), request("d", 1)]
    ahead = make_ahead(requests, lengths={"c": 50.0, "a": 900.0, "d": 7.0})
    assert [(r.problem_id, r.policy_step) for r in ahead.requests] == [("c", 1), ("d", 1), ("b", 1), ("a", 2)]


def test_an_older_reference_that_came_further_keeps_its_end_and_used_ones_are_dropped() -> None:
    asked, used = request("p"), request("q", 0)
    references = References()
    references.keep(asked.key, range(20), 0)
    references.keep(used.key, range(5), 0)
    ahead = make_ahead([asked], references=references, past=[used])
    assert ahead.num_offered == 5
    references.keep(used.key, range(9), REPLAY)
    assert make_ahead([asked], references=references, past=[used]).num_offered == 0, "another run's are no offer of ours"
    ahead.run(after(3))
    ahead.end()
    kept = references.get(asked.key)
    assert kept is not None
    assert [*kept.token_ids] == [*plain([asked])[asked.key][:3], *range(3, 20)]
    assert references.get(used.key) is None


@pytest.mark.parametrize(
    "words",
    [
        ["--rollout.speculation=off"],
        ["--rollout.speculation=4x1x4"],
        ["--rollout.tuner=beg-mab"],
        ["--rollout.engine=vllm"],
    ],
)
def test_what_nothing_would_draft_from_is_not_generated_ahead(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"rollout\.ahead is 1, but nothing would draft from what is generated"):
        load_config("recipes/countdown/quickstart.toml", ["--rollout.ahead=1", *words])


def test_what_follows_references_may_be_generated_ahead_for() -> None:
    for words in ([], ["--rollout.speculation=ahead+hybrid:64x1x64"]):
        assert load_config("recipes/countdown/quickstart.toml", ["--rollout.ahead=1", *words]).rollout.ahead == 1


@pytest.mark.parametrize("speculation", ["off", "4x1x4"])
def test_references_that_nothing_drafts_from_are_refused(speculation: str) -> None:
    asked = {"model": "m", "prompts": "p", "out": "o", "references": "r", "speculation": speculation}
    with pytest.raises(UserError, match="nothing is drafted from them"):
        check_references(Generate.model_validate(asked))

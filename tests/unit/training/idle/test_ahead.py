"""Generating ahead: who is given what, when it stops, and what all ranks know of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.lossless.helpers import VOCAB, make_engine, make_policy
from tlt.apps.cli.generate import Generate
from tlt.apps.cli.generate import run as generate
from tlt.base.config.load import load_config
from tlt.base.records import AheadReport
from tlt.base.types import Request, SamplingParams, UserError
from tlt.drafter.drafting.retrieval.references import References
from tlt.training.idle.ahead import AheadOfPolicy

PARAMS = SamplingParams(1.0, max_tokens=24, seed=3)


def request(problem: str, step: int = 1, sample: int = 0) -> Request:
    return Request(problem, sample, (9, 11, ord(problem[-1]) % VOCAB), PARAMS, "rollout", step)


def after(num: int) -> Callable[[], bool]:
    """Says stop when it has been asked so many times."""
    asked = iter(range(num))
    return lambda: next(asked, None) is None


def make_ahead(requests: list[Request], **changes: Any) -> AheadOfPolicy:
    given = {"engine": make_engine(make_policy()), "references": References()} | changes
    given = {"past": [], "lengths": {}, "num_replicas": 1} | given
    ahead = AheadOfPolicy(requests=requests, **given)
    ahead.begin(HashStore())
    return ahead


def tokens_of(ahead: AheadOfPolicy) -> dict[tuple[int, int, int, int], tuple[int, ...]]:
    return {key: token_ids for key, (token_ids, _) in ahead.found.items()}


def plain(requests: list[Request]) -> dict[tuple[int, int, int, int], tuple[int, ...]]:
    by_name = {(r.problem_id, r.sample_index): r.noise_key for r in requests}
    rollouts = make_engine(make_policy()).generate(requests)
    return {by_name[r.problem_id, r.sample_index]: r.token_ids for r in rollouts}


def test_what_was_generated_ahead_is_what_the_policy_says_and_all_of_it_becomes_references() -> None:
    requests = [request(f"p{i}") for i in range(10)]
    references = References()
    ahead = make_ahead(requests, references=references)
    report = ahead.run(lambda: False)
    assert report.num_tokens == sum(map(len, plain(requests).values()))
    ahead.keep([ahead.take_found()])
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
    lengths = sorted(len(token_ids) for token_ids, _ in ahead.found.values())
    assert lengths == [4, 5, 5], "two at first, then the third"
    assert not any(is_whole for _, is_whole in ahead.found.values())
    second = ahead.run(lambda: False)
    assert first.num_tokens + second.num_tokens == sum(map(len, plain(requests).values()))
    assert tokens_of(ahead) == plain(requests)
    assert all(is_whole for _, is_whole in ahead.found.values())
    assert ahead.run(lambda: False) == AheadReport(), "nothing is left"


def test_a_response_that_was_preempted_leaves_the_engine_as_running_ones_do() -> None:
    requests = [request(f"p{i}") for i in range(3)]
    engine, asked = make_engine(make_policy()), []

    def should_stop() -> bool:
        if len(asked) == 3:  # from here on there is memory for one response
            engine.memory.has_room = engine.memory.fits_longer = lambda num_slots, length: num_slots == 1
        asked.append(engine.num_waiting)
        return len(asked) > 5

    ahead = make_ahead(requests, engine=engine)
    ahead.run(should_stop)
    assert asked[-1] > 0
    assert engine.is_idle
    ahead.run(lambda: False)
    assert tokens_of(ahead) == plain(requests)


def test_two_replicas_share_the_requests_of_a_step_and_one_does_what_the_other_has_begun_and_left() -> None:
    requests, store = [request(f"p{i}") for i in range(8)], HashStore()
    replicas = []
    for _ in range(2):
        ahead = make_ahead(requests, num_replicas=2)
        ahead.begin(store)
        replicas.append(ahead)
    for ahead in replicas:
        ahead.run(after(2))  # takes a lot of two, another one, and is called away
    assert [len(ahead.found) for ahead in replicas] == [4, 4]
    assert not replicas[0].found.keys() & replicas[1].found.keys()
    replicas[1].run(lambda: False)
    assert tokens_of(replicas[1]) == plain(requests), "the first one is busy, and its four are done here"
    replicas[0].run(lambda: False)
    assert replicas[0].found.keys() == {requests[i].noise_key for i in range(4)}, (
        "and what the other has done is not done again"
    )


def test_the_next_step_comes_before_the_one_behind_it_and_the_longest_problems_first() -> None:
    requests = [request("a", 2), request("c", 2), request("b"), request("c"), request("d")]
    ahead = make_ahead(requests, lengths={"c": 50.0, "a": 900.0, "d": 7.0})
    assert [(r.problem_id, r.policy_step) for r in ahead.requests] == [("c", 1), ("d", 1), ("b", 1), ("a", 2)]


def test_an_older_reference_that_came_further_keeps_its_end_and_used_ones_are_dropped() -> None:
    asked, used = request("p"), request("q", 0)
    references = References()
    references.keep(asked.noise_key, range(20), 0)
    references.keep(used.noise_key, range(5), 0)
    ahead = make_ahead([asked], references=references, past=[used])
    assert ahead.num_offered == 5
    ahead.run(after(3))
    ahead.keep([ahead.take_found()])
    ahead.end()
    kept = references.get(asked.noise_key)
    assert kept is not None
    assert [*kept.token_ids] == [*plain([asked])[asked.noise_key][:3], *range(3, 20)]
    assert not kept.is_whole
    references.keep(asked.noise_key, range(50), 0, is_whole=True)
    ahead.run(lambda: False)
    ahead.keep([ahead.take_found()])
    kept = references.get(asked.noise_key)
    assert kept is not None
    assert tuple(kept.token_ids) == plain([asked])[asked.noise_key], "a whole one has no rest"
    assert kept.is_whole
    assert ahead.take_found() == {}
    assert references.get(used.noise_key) is None


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
    with pytest.raises(
        UserError, match=r"rollout\.ahead is 1, but nothing would draft from what is generated"
    ):
        load_config("recipes/countdown/quickstart.toml", ["--rollout.ahead=1", *words])


@pytest.mark.parametrize(
    "option",
    [{"speculation": "off"}, {"speculation": "4x1x4"}, {"speculation": "adaptive", "engine": "vllm"}],
)
def test_references_that_nothing_drafts_from_are_refused(option: dict[str, str], tmp_path: Path) -> None:
    asked = {"model": "m", "prompts": "p", "out": tmp_path / "o.jsonl", "references": "r", **option}
    with pytest.raises(UserError, match="nothing is drafted from them"):
        generate(Generate.model_validate(asked))

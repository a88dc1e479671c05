"""A response with a further turn goes on from what the engine kept of it: the same tokens, and only what was said
meanwhile is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.cases import cases
from tests.lossless.helpers import CONFIG, STOP, Switching, make_engine, make_policy, random_drafter
from tlt.base.strategy import Strategy
from tlt.base.types import Finished, Request, Rollout, SamplingParams, Turns, id_of
from tlt.drafter.drafting.learned.drafter import LearnedDrafter
from tlt.drafter.drafting.retrieval.ngram import NgramDrafter
from tlt.engine.own.engine import RolloutEngine
from tlt.speculation.tuner.protocol import StrategyTuner
from tlt.speculation.tuner.tuner import FixedTuner

POLICY = make_policy()
SAID = (11, 12, 13)
PROMPTS = {"a": (1, 2, 3, 4), "b": (5, 6), "c": (9,)}
MAX_TURNS = 4


def requests(num_samples: int = 4, stop: int = STOP, greedy: bool = False) -> list[Request]:
    params = SamplingParams(temperature=0.0 if greedy else 1.0, max_tokens=60, stop_ids=(stop, 30, 41, 52))
    return [
        Request(problem, index, prompt, params)
        for problem, prompt in PROMPTS.items()
        for index in range(num_samples)
    ]


def next_turn(asked: Sequence[Request], rollout: Rollout) -> Request:
    turns = rollout.turns or Turns()
    first = len(rollout.token_ids)
    of = next(one for one in asked if id_of(one) == id_of(rollout))
    return replace(
        of,
        token_ids=(*rollout.token_ids, *SAID),
        logprobs=(*rollout.logprobs, *[0.0] * len(SAID)),
        turns=replace(turns, given=(*turns.given, (first, first + len(SAID)))),
    )


def converse(
    engine: RolloutEngine,
    asked: Sequence[Request],
    between: Callable[[int], None] = lambda step: None,
    delay: int = 2,
) -> dict[Any, Rollout]:
    """Every turn that stops is answered `delay` steps later."""
    engine.add(asked)
    waiting: list[tuple[int, Rollout]] = []
    ended: dict[Any, Rollout] = {}
    step = 0
    while waiting or not engine.is_idle:
        due = [rollout for ready, rollout in waiting if ready <= step]
        waiting = [one for one in waiting if one[0] > step]
        engine.add(next_turn(asked, rollout) for rollout in due)
        finished: list[Finished] = [] if engine.is_idle else engine.step()
        for one in finished:
            num_turns = len(one.rollout.turns.given if one.rollout.turns else ()) + 1
            if one.rollout.finish_reason == "stop" and num_turns < MAX_TURNS:
                waiting.append((step + delay, one.rollout))
            else:
                engine.forget(id_of(one.rollout))
                ended[id_of(one.rollout)] = one.rollout
        between(step)
        step += 1
    return ended


def read_by(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the forwards of prefills to come."""
    sizes: list[int] = []
    prefill = engine._prefill

    def watched(admissions: Any) -> None:
        forward = engine.target.forward_capturing

        def counted(ids: torch.Tensor, *rest: Any) -> Any:
            sizes.append(len(ids))
            return forward(ids, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(engine.target, "forward_capturing", counted)
            prefill(admissions)

    monkeypatch.setattr(engine, "_prefill", watched)
    return sizes


def build(arm: str, parks: bool, max_batch_size: int = 5, drafter: str = "learned") -> RolloutEngine:
    tuner: StrategyTuner | None
    if arm == "switching":
        names = ("off", "learned:3x1x3", "ngram:2x1x2", "hybrid:2x2x3", "learned:2x2x3")
        tuner = Switching([Strategy.parse(name) for name in names], seed=4)
    else:
        tuner = None if arm == "off" else FixedTuner(Strategy.parse(arm))
    engine = make_engine(POLICY, tuner, drafter, max_batch_size=max_batch_size)
    engine.parks = parks
    return engine


def told(rollouts: dict[Any, Rollout]) -> dict[Any, tuple[int, ...]]:
    return {one: rollout.token_ids for one, rollout in rollouts.items()}


@cache
def alone(greedy: bool) -> dict[Any, Rollout]:
    return converse(build("off", parks=False, max_batch_size=1), requests(greedy=greedy))


@pytest.mark.parametrize(
    ("arm", "greedy"),
    cases(
        product(["off", "learned:3x1x3", "ngram:3x1x3", "hybrid:2x2x3", "switching"], [False, True]),
        usual=[("off", False), ("learned:3x1x3", False), ("switching", False), ("switching", True)],
    ),
)
def test_what_is_kept_changes_no_token(arm: str, greedy: bool) -> None:
    asked, expected = requests(greedy=greedy), alone(greedy)
    engine = build(arm, parks=True)
    kept = converse(engine, asked)
    assert told(kept) == told(expected)
    for one, rollout in kept.items():
        assert torch.allclose(torch.tensor(rollout.logprobs), torch.tensor(expected[one].logprobs), atol=1e-9)
    assert any(rollout.turns and len(rollout.turns.given) > 1 for rollout in kept.values())
    assert engine.stats.num_kept_tokens > 0
    assert engine.stats.num_reread_tokens == 0
    assert len(engine.memory.parking) == engine.memory.parking.num_bytes == 0


@pytest.mark.parametrize("arm", ["dflash", "dspark"])
def test_block_drafters_go_on_too(arm: str) -> None:
    kept = converse(build("learned:3x1x3", parks=True, drafter=arm), requests())
    assert told(kept) == told(converse(build("off", parks=False), requests()))


def test_only_what_was_said_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build("learned:2x1x2", parks=True, max_batch_size=1)
    asked = requests()[:1]
    sizes = read_by(engine, monkeypatch)
    rollout = converse(engine, asked)["a", 0]
    assert rollout.turns is not None
    num_turns = len(rollout.turns.given)
    assert num_turns > 1
    # the last token of a turn was drawn and not read; the last one said is the root
    assert sizes == [len(PROMPTS["a"]) - 1, *[1 + len(SAID) - 1] * num_turns]


def test_what_was_said_to_several_is_read_in_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build("learned:2x1x2", parks=True, max_batch_size=8)
    asked = requests(num_samples=2)
    sizes = read_by(engine, monkeypatch)
    kept = converse(engine, asked, delay=30)  # all wait, and come back in groups
    assert told(kept) == told(converse(build("off", parks=False, max_batch_size=1), asked))
    num_turns = sum(len(rollout.turns.given) if rollout.turns else 0 for rollout in kept.values())
    _, *later = sizes  # the prompts, and what was said
    assert sum(later) == num_turns * len(SAID)
    assert len(later) < num_turns


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_learned_drafter_drafts_as_if_the_response_had_never_left(is_trained: bool) -> None:
    """Its drafts are those of one that reads everything again, also where new weights came meanwhile."""

    def accepted(parks: bool) -> list[int]:
        engine = build("learned:4x1x4", parks, max_batch_size=3)
        learned = engine.drafter.learned
        assert isinstance(learned, LearnedDrafter)
        weights = random_drafter(CONFIG, "learned").state_dict()

        def train(step: int) -> None:
            if is_trained and step % 2:
                learned.load({name: tensor * (1 + 0.05 * step) for name, tensor in weights.items()}, step)

        rollouts = converse(engine, requests(num_samples=2), train)
        return [draft.num_accepted for one in sorted(rollouts) for draft in rollouts[one].drafts or ()]

    assert sum(accepted(parks=True)) > 0
    assert accepted(parks=True) == accepted(parks=False)


def test_a_response_that_ended_or_was_handed_over_is_forgotten() -> None:
    engine = build("off", parks=True)
    engine.add(requests(1))
    ended: list[Rollout] = []
    while not engine.is_idle:
        ended += [one.rollout for one in engine.step() if one.rollout.finish_reason == "stop"]
    assert len(engine.memory.parking) == len(ended) > 1
    engine.forget(id_of(ended[0]))
    assert len(engine.memory.parking) == len(ended) - 1
    engine.add([next_turn(requests(), ended[1])])
    engine.withdraw_waiting(1)
    assert len(engine.memory.parking) == len(ended) - 2
    engine.release()
    assert len(engine.memory.parking) == engine.memory.parking.num_bytes == 0


def test_other_tokens_than_were_kept_are_read_from_the_start() -> None:
    engine = build("off", parks=True)
    engine.add(requests(1)[:1])
    rollout = next(iter(engine.generate([])))
    other = replace(rollout, token_ids=(59, *rollout.token_ids[1:]))
    (went_on,) = engine.generate([next_turn(requests(), other)])
    (expected,) = build("off", parks=False).generate([next_turn(requests(), other)])
    assert went_on.token_ids == expected.token_ids
    assert engine.stats.num_kept_tokens == 0


@pytest.mark.parametrize("blocks", [3.0, 5.5, 9.0])
def test_the_running_ones_displace_those_that_wait(blocks: float) -> None:
    """Within any budget the tokens are the same; at no moment more bytes are held than it has."""
    engine = build("learned:2x1x2", parks=True)
    one_block = engine.memory.slot_bytes(CONFIG.max_positions)
    most = int(blocks * one_block)
    engine.memory._cache_bytes = lambda: most
    held: list[int] = []

    def measure(step: int) -> None:
        cache = engine.cache
        held.append(cache.num_slots * cache.slot_bytes(cache.capacity) + engine.memory.parking.num_bytes)

    assert told(converse(engine, requests(), measure)) == told(converse(build("off", False), requests()))
    assert max(held) <= most
    if blocks < 4:
        assert engine.stats.num_reread_tokens > 0


def test_a_text_that_retrieval_knows_goes_on_and_is_kept_once() -> None:
    engine = build("ngram:3x1x3", parks=True, drafter="ngram")
    rollouts = converse(engine, requests())
    assert isinstance(engine.drafter, NgramDrafter)
    texts = [tuple(text) for index in engine.drafter.problems.values() for _, text in index.ended_texts()]
    assert sorted(texts) == sorted((*one.prompt_ids, *one.token_ids) for one in rollouts.values())


def test_of_samples_that_share_a_text_all_are_read_again_unless_all_were_parked() -> None:
    def went_on(forgotten: int) -> tuple[list[tuple[int, ...]], RolloutEngine]:
        engine = build("off", parks=True)
        asked = requests(num_samples=2, greedy=True)[:2]
        ended = sorted(engine.generate(asked), key=lambda one: one.sample_index)
        assert ended[0].token_ids == ended[1].token_ids
        for one in ended[:forgotten]:
            engine.forget(id_of(one))
        further = engine.generate([next_turn(asked, one) for one in ended])
        return [one.token_ids for one in further], engine

    kept, engine = went_on(0)
    assert engine.stats.num_kept_tokens > engine.stats.num_reread_tokens == 0
    read, engine = went_on(1)
    assert engine.stats.num_reread_tokens > engine.stats.num_kept_tokens == 0
    assert kept == read

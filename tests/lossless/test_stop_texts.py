"""A stop text ends a response at the first token after which the response's text holds it: whatever was
drafted, and wherever the response was begun."""

from __future__ import annotations

import random
from collections.abc import Sequence as Ids
from dataclasses import replace
from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.cases import cases
from tests.lossless.helpers import VOCAB, by_id, make_engine, make_policy, make_requests
from tests.refused import refused
from tlt.base.strategy import Strategy
from tlt.base.types import Request, Rollout, SamplingParams, Verdict, id_of
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.sequence import Sequence
from tlt.speculation.tuner.tuner import FixedTuner

POLICY = make_policy()
STOPS = ("abab", "ccc", "bcacb")
WORDS = tuple("".join(random.Random(token).choices("abc", k=token % 4)) for token in range(VOCAB))
"""Texts of the tokens: of no letter up to three, so that a stop text begins and ends within tokens."""

REQUESTS = make_requests(num_problems=7, num_samples=4, seed=11)
STOPPING = [replace(request, params=replace(request.params, stop=STOPS)) for request in REQUESTS]


def decode(ids: Ids[int]) -> str:
    return "".join(WORDS[token] for token in ids)


def engine_for(strategy: Strategy = Strategy.OFF, max_batch_size: int = 8) -> RolloutEngine:
    engine = make_engine(
        POLICY, None if strategy.is_off else FixedTuner(strategy), max_batch_size=max_batch_size
    )
    engine.decode = decode
    return engine


@cache
def expected() -> dict[tuple[str, int], tuple[tuple[int, ...], str]]:
    """Whole responses, cut by the definition alone: the text of all tokens so far."""
    cut = {}
    for key, rollout in by_id(make_engine(POLICY).generate(REQUESTS)).items():
        ends = [
            n
            for n in range(1, len(rollout.token_ids) + 1)
            if any(s in decode(rollout.token_ids[:n]) for s in STOPS)
        ]
        cut[key] = (
            (rollout.token_ids[: ends[0]], "stop") if ends else (rollout.token_ids, rollout.finish_reason)
        )
    return cut


def test_the_stop_texts_of_this_test_end_some_responses_and_not_others() -> None:
    whole = by_id(make_engine(POLICY).generate(REQUESTS))
    num_cut = sum(len(expected()[key][0]) < len(rollout.token_ids) for key, rollout in whole.items())
    assert 5 <= num_cut <= len(REQUESTS) - 5


@pytest.mark.parametrize(
    ("strategy", "max_batch_size"),
    cases(
        [
            (Strategy.OFF, 28),
            (Strategy("learned", 4, 1, 4), 5),
            (Strategy("learned", 3, 2, 6), 28),
            (Strategy("ngram", 6, 1, 6), 1),
            (Strategy("hybrid", 5, 3, 12), 5),
        ],
        usual=[(Strategy.OFF, 28), (Strategy("learned", 4, 1, 4), 5), (Strategy("hybrid", 5, 3, 12), 5)],
    ),
    ids=str,
)
def test_a_response_ends_at_the_first_token_that_completes_a_stop_text_whatever_is_drafted(
    strategy: Strategy, max_batch_size: int
) -> None:
    found = by_id(engine_for(strategy, max_batch_size).generate(STOPPING))
    assert {key: (rollout.token_ids, rollout.finish_reason) for key, rollout in found.items()} == expected()
    assert all(len(rollout.logprobs) == len(rollout.token_ids) for rollout in found.values())


def test_a_response_that_another_engine_has_begun_ends_where_it_would_have_ended_there() -> None:
    strategies = [Strategy.OFF, Strategy("learned", 4, 1, 4), Strategy("hybrid", 3, 2, 6)]
    engines = [engine_for(strategy, 28) for strategy in strategies]
    engines[0].add(STOPPING)
    found: list[Rollout] = []
    for turn in range(10_000):
        engine, other = engines[turn % 3], engines[(turn + 1) % 3]
        for _ in range(3):
            found += [finished.rollout for finished in engine.step()]
        other.add(engine.withdraw(range(len(engine.running))))
        if all(engine.is_idle for engine in engines):
            break
    assert {id_of(r): (r.token_ids, r.finish_reason) for r in found} == expected()


def make_bytewise() -> Tokenizer:
    """Returns a tokenizer whose tokens are single bytes; 256 is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<nothing>"])
    return bytewise


@pytest.mark.parametrize("stop", ["é", "🙂!", " b", "\n\n", "aé🙂"])
def test_stop_texts_of_several_bytes_a_character_are_found_where_their_last_byte_is(stop: str) -> None:
    """Tokens are single bytes, so a character's token is no text until it is whole; some tokens are
    special and say nothing."""
    bytewise, rng = make_bytewise(), random.Random(stop)
    for _ in range(60):
        ids = bytewise.encode("".join(rng.choices(["a", "é", "🙂", "!", " b", "\n", stop], k=12))).ids
        for index in sorted(rng.choices(range(len(ids)), k=6), reverse=True):
            ids.insert(index, 256)
        ends = [n for n in range(1, len(ids) + 1) if stop in bytewise.decode(ids[:n])]
        params = SamplingParams(stop=(stop,), max_tokens=10_000)
        sequence = Sequence.start(Request("p", 0, (1, 2), params), window=20_000)
        for token in ids:
            sequence.commit(Verdict((token,), 0, (0,), (0.0,)), lambda ids: str(bytewise.decode(ids)))
            if sequence.finish_reason is not None:
                break
        assert len(sequence.response_ids) == (ends[0] if ends else len(ids))


@pytest.mark.parametrize("stop", ["é", "🙂!", " b", "aé🙂", "\ufffd", "b\ufffd"])
def test_a_commit_of_many_tokens_ends_where_one_by_one_would_and_asks_the_tokenizer_four_times_at_most(
    stop: str,
) -> None:
    """Tokens are single bytes and special ones, which say nothing: it is asked for more where they are few
    letters. A part of a character is U+FFFD."""
    bytewise, params = make_bytewise(), SamplingParams(stop=(stop,), max_tokens=150)
    rng, num_calls, num_cut = random.Random(stop), 0, 0

    def decode(ids: Ids[int]) -> str:
        nonlocal num_calls
        num_calls += 1
        return str(bytewise.decode(ids))

    for _ in range(60):
        ids = bytewise.encode("".join(rng.choices(["a", "é", "🙂", "!", " b", "\n"], k=40))).ids
        for index in sorted(rng.choices(range(len(ids)), k=12), reverse=True):
            ids.insert(index, 256)
        alone, together = (Sequence.start(Request("p", 0, (1, 2), params), window=20_000) for _ in range(2))
        for token in ids:
            if alone.finish_reason is None:
                alone.extend((token,), (-float(token),), decode)
        place = 0
        while place < len(ids) and together.finish_reason is None:
            some, num_calls = ids[place : place + rng.randint(1, 16)], 0
            place += together.extend(tuple(some), tuple(-float(token) for token in some), decode)
            assert num_calls <= 4 or together.finish_reason == "stop" or "\ufffd" in stop
        num_cut += place < len(ids)
        assert together == alone
    assert num_cut > 10


def test_a_stop_text_without_a_tokenizer_and_an_empty_one_are_refused() -> None:
    with refused(r"stop is .*abab.* but the model's folder has no tokenizer; give stop_ids"):
        make_engine(POLICY).add(STOPPING[:1])
    for wrong in (("",), "abc"):
        with refused(r"^stop: is"):
            SamplingParams(stop=wrong)  # type: ignore[arg-type]  # as a user without a type checker would

"""The engine's housekeeping: prefill, slots, memory, counts, limits. That its tokens are right is
tests/lossless's affair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.lossless.helpers import CONFIG, STOP, VOCAB, make_engine, make_policy, make_requests, tokens_of
from tests.refused import refused
from tlt.base.spans import Span
from tlt.base.speculation import Off, parse_speculation
from tlt.base.strategy import Strategy
from tlt.base.types import Request, SamplingParams, UserError
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.models.packed import PackedTransformer
from tlt.speculation.tuner.tuner import FixedTuner, make_tuner

POLICY = make_policy()


def request(
    problem: str, index: int, prompt: tuple[int, ...], max_tokens: int = 5, stop: int = STOP
) -> Request:
    return Request(problem, index, prompt, SamplingParams(max_tokens=max_tokens, stop_ids=(stop,)))


def watched_engine(monkeypatch: pytest.MonkeyPatch) -> tuple[RolloutEngine, list[int]]:
    """Returns an engine, and the numbers of tokens of its forwards to come."""
    engine, forwarded = make_engine(POLICY), []
    forward = engine.target.forward_capturing

    def watched(ids: torch.Tensor, *rest: Any) -> Any:
        forwarded.append(len(ids))
        return forward(ids, *rest)

    monkeypatch.setattr(engine.target, "forward_capturing", watched)
    return engine, forwarded


def test_a_prompt_is_prefilled_once_for_all_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, forwarded = watched_engine(monkeypatch)
    engine.add(
        request(name, i, prompt) for name, prompt in (("a", (1, 2, 3, 4)), ("b", (5, 6))) for i in range(3)
    )
    engine.step()
    assert forwarded == [3 + 1, 6]  # both prompts but for their last tokens, together; then the six roots


def test_what_is_prefilled_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order; a text that is too long alone goes alone, part by part."""
    monkeypatch.setattr("tlt.engine.own.prefill._PART_TOKENS", 6)
    monkeypatch.setattr("tlt.models.kv_cache.PREFILL_TOKENS", 9)
    engine, forwarded = watched_engine(monkeypatch)
    engine.add(request(str(i), 0, tuple(range(1, length + 1))) for i, length in enumerate((4, 5, 3, 20, 2)))
    engine.step()
    assert forwarded == [3 + 4, 2, 9, 6, 4, 1, 5]


def test_when_a_request_ends_only_the_last_sequence_moves() -> None:
    """No copy of the whole cache: slots of sequences that neither ended nor came last keep their memory,
    untouched."""
    engine = make_engine(POLICY)
    engine.add([request("a", i, (1, 2, 3), max_tokens=2 if i == 1 else 9, stop=VOCAB) for i in range(4)])
    engine.step()
    storage = engine.cache.groups[0]
    staying = [storage[:, slot].clone() for slot in (0, 2)]
    moved = storage[:, 3].clone()
    ended = engine.step()
    assert [finished.rollout.sample_index for finished in ended] == [1]
    assert engine.cache.groups[0] is storage
    length = 3 + 1  # prompt and the first token; the second token's entries are new
    for slot, before in zip((0, 2), staying, strict=True):
        assert torch.equal(storage[:, slot, :, : length - 1], before[:, :, : length - 1])
    assert torch.equal(storage[:, 1, :, : length - 1], moved[:, :, : length - 1])
    assert [s.request.sample_index for s in engine.scheduler.running] == [0, 3, 2]


def test_the_tail_does_not_pay_for_the_memory_of_what_has_ended() -> None:
    """One long response among short ones: the cache grows for it alone, and keeps what it knew. Others
    that come while it runs get as much room each, those that come after it start small."""
    limits = [140, 2, 2, 2, 2, 2]
    requests = [request("a", i, (1, 2, 3), max_tokens=limit, stop=VOCAB) for i, limit in enumerate(limits)]
    alone = tokens_of(make_engine(POLICY), requests[:1])
    engine = make_engine(POLICY, FixedTuner(Strategy("learned", 3, 1, 3)))
    assert alone.items() <= tokens_of(engine, requests).items()
    assert [engine.cache.groups[0].shape[i] for i in (1, 3)] == [1, 256]
    engine.add(replace(r, problem_id="b") for r in requests[1:])
    engine.step()
    assert [engine.cache.groups[0].shape[i] for i in (1, 3)] == [5, 128]
    engine.abort()
    engine.add(replace(r, problem_id="c") for r in requests[:1])
    while len(engine.scheduler.running[0].tokens if engine.scheduler.running else ()) < 130:
        engine.step()
    engine.add(replace(r, problem_id="c") for r in requests[1:])
    engine.step()
    assert [engine.cache.groups[0].shape[i] for i in (1, 3)] == [6, 256]


def test_the_span_of_a_step_tells_strategy_batch_size_and_tokens() -> None:
    engine, spans = make_engine(POLICY), list[Span]()
    engine.on_span = spans.append
    engine.add(request("a", i, (1, 2, 3), stop=VOCAB) for i in range(3))
    while not engine.is_idle:
        engine.step()
    steps = [span for span in spans if span.strategy]
    assert {(span.name, span.strategy, span.num_running, span.num_tokens) for span in steps} == {
        ("decode", "off", 3, 3)
    }
    assert sum(span.num_tokens for span in steps) == engine.stats.num_tokens == 3 * 5


def test_without_speculation_nothing_is_allocated_for_drafting() -> None:
    engine = make_engine(POLICY, tuner=make_tuner(Off(), ["learned"]))
    assert engine.tuner is None
    tokens_of(engine, make_requests(3, 2, seed=0))
    assert engine.drafter.kinds == ()
    assert engine.stats.accept_length is None
    with refused("speculation is off"):
        engine.load_drafter(make_engine(POLICY, FixedTuner(Strategy("learned", 2, 1, 2))).drafter)


def test_a_response_ends_at_a_stop_token_at_its_limit_or_at_the_window() -> None:
    engine = make_engine(POLICY)
    long_prompt = tuple(range(1, 58)) * 3
    prompt = tuple(t for t in long_prompt if t != STOP)[: CONFIG.max_positions - 4]
    rollouts = list(engine.generate([request("w", i, prompt, max_tokens=100) for i in range(8)]))
    assert max(len(r.token_ids) for r in rollouts) == 4  # what the window leaves
    for rollout in rollouts:
        ended_by_stop = rollout.token_ids[-1] == STOP
        assert rollout.finish_reason == ("stop" if ended_by_stop else "length")
        assert STOP not in rollout.token_ids[:-1]
        assert len(rollout.logprobs) == len(rollout.token_ids)


@pytest.mark.parametrize("strategy", [Strategy.OFF, Strategy("learned", 3, 1, 3)], ids=str)
def test_a_response_that_was_over_when_it_came_ends_there(strategy: Strategy) -> None:
    """A Request may go on from tokens of the caller's own. Beside them others are generated as ever."""
    (other,) = make_engine(POLICY).generate([request("other", 0, (1, 2, 3), max_tokens=20)])
    for num, last, end, reason in (
        (5, 1, 5, "length"),
        (10, 1, 5, "length"),
        (3, STOP, 3, "stop"),
        (10, STOP, 5, "length"),
    ):
        begun = (*[1] * (num - 1), last)
        over = replace(request("over", 0, (1, 2, 3)), token_ids=begun, logprobs=(-1.0,) * num)
        engine = make_engine(POLICY, FixedTuner(strategy))
        found = {
            r.problem_id: r for r in engine.generate([over, request("other", 0, (1, 2, 3), max_tokens=20)])
        }
        assert (found["over"].token_ids, found["over"].finish_reason) == (begun[:end], reason)
        assert found["over"].logprobs == (-1.0,) * end
        assert found["other"].token_ids == other.token_ids


def test_a_response_that_ends_with_a_stop_text_goes_on_no_more() -> None:
    engine = RolloutEngine(
        PackedTransformer(POLICY.config, torch.float64), decode=lambda ids: "".join(map(chr, ids))
    )
    engine.load_policy(dict(POLICY.named_parameters()))
    texts = SamplingParams(max_tokens=30, stop=("\x05\x06",))
    begun = Request("begun", 0, (1, 2, 3), texts, token_ids=(9, 5, 6), logprobs=(-1.0,) * 3)
    (found,) = engine.generate([begun])
    assert (found.token_ids, found.finish_reason) == ((9, 5, 6), "stop")


def test_a_response_to_go_on_from_needs_a_logprob_for_each_token() -> None:
    with refused("'begun' has 3 token_ids but 2 logprobs; give one each"):
        make_engine(POLICY).add(
            [replace(request("begun", 0, (1,)), token_ids=(4, 5, 6), logprobs=(-1.0, -1.0))]
        )


@pytest.mark.parametrize("strategy", [Strategy.OFF, Strategy("ngram", 3, 1, 3)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_policy_whose_logits_are_not_finite_is_refused_by_version_problem_and_position(
    strategy: Strategy, temperature: float
) -> None:
    engine = make_engine(POLICY, FixedTuner(strategy), drafter="ngram")
    tensors = {name: tensor.detach().clone() for name, tensor in POLICY.named_parameters()}
    tensors["model.norm.weight"][0] = float("nan")
    engine.load_policy(tensors, version=17)
    with refused(r"policy 17 .* not finite .*'broken'.* position 4"):
        list(engine.generate([Request("broken", 0, (1, 2, 3, 4), SamplingParams(temperature=temperature))]))


@pytest.mark.parametrize("length", [0, CONFIG.max_positions])
def test_a_prompt_that_cannot_be_answered_is_refused_by_name(length: int) -> None:
    with refused("'bad'"):
        make_engine(POLICY).add([request("bad", 0, (1,) * length)])


def test_accept_length_and_survival_count_as_defined() -> None:
    stats = EngineStats()
    stats.record_verifications(
        (3, 3, 3), (3, 0, 2), (4, 1, 2), depth=3
    )  # a stop token cut the last one short
    assert stats.accept_length == pytest.approx(7 / 3)
    assert stats.draft_acceptance_rate_pos == [2 / 3, 2 / 3, 1 / 3]
    twice = EngineStats()
    twice.add(stats)
    twice.add(stats)
    assert twice.draft_acceptance_rate_pos == stats.draft_acceptance_rate_pos
    assert twice.num_verifications == 6


def test_acceptance_counts_as_vllm_counts_it() -> None:
    """vLLM: accepted / drafted tokens; 1 + accepted tokens / drafts; at position k, accepted there /
    drafts. A verification of no drafted token is no draft; a tree's drafted tokens are all its nodes."""
    chains = [(3, 3), (3, 1), (1, 0), (0, 0), (2, 2)]  # (drafted, accepted)
    stats = EngineStats()
    assert stats.draft_acceptance_rate is stats.draft_mean_acceptance_length is None
    for step in (chains[:2], chains[2:]):
        drafted, accepted = zip(*step, strict=True)
        stats.record_verifications(drafted, accepted, [num + 1 for num in accepted], max(drafted))
    drafts = [(drafted, accepted) for drafted, accepted in chains if drafted]
    num_accepted = sum(accepted for _, accepted in drafts)
    assert stats.draft_acceptance_rate == pytest.approx(num_accepted / sum(drafted for drafted, _ in drafts))
    assert stats.draft_mean_acceptance_length == pytest.approx(1 + num_accepted / len(drafts))
    shares = [sum(accepted >= k for _, accepted in drafts) / len(drafts) for k in (1, 2, 3)]
    assert stats.draft_acceptance_rate_pos == pytest.approx(shares) == [3 / 4, 2 / 4, 1 / 4]
    stats.record_verifications((7,), (2,), (3,), 2)
    assert stats.draft_acceptance_rate == pytest.approx(8 / 16)


@pytest.mark.parametrize("text", ["4", "4x1", "axbxc", "0x1x1", "4x1x3", "-1x1x1", "fast", "33x1x33"])
def test_a_strategy_that_makes_no_sense_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError) as error:
        make_tuner(parse_speculation(text), ["learned"])
    assert "\n" not in str(error.value)

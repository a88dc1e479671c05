"""What vLLM says of its drafts is what happened, and log-probabilities stay while it drafts: under the law,
with the tuner.

What happened is counted from the tokens alone: a draft's tokens are accepted as far as they are those of the
response that our own engine gives without drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.side_by_side import RandomLengths, answers
from tests.vllm.parts import BASE, DRAFTER, in_vllm, vllm_engine
from tlt.base.strategy import Strategy
from tlt.base.types import Request
from tlt.base.types import SamplingParams as OurParams
from tlt.engine.build.model import load_model
from tlt.speculation.tuner.tuner import FixedTuner

pytestmark = in_vllm

SPARE = 16
"""Tokens behind a response's end that a last draft may reach."""
NUM_TOKENS, WINDOW = 90, 240
PARAMS = (OurParams(1.0), OurParams(0.0), OurParams(0.8, top_k=9, top_p=0.95, min_p=0.02))


def requests_for(num: int) -> list[Request]:
    """Without stop tokens: long responses."""
    tokenizer = load_model(BASE, torch.float32).tokenizer
    assert tokenizer is not None
    prompts = [tuple(tokenizer.encode_text(f"[{i + 1},{i + 3},7:{20 + i}]")) for i in range(num)]
    params = [replace(one, max_tokens=NUM_TOKENS, seed=6) for one in PARAMS]
    return [Request(f"f{i}", 0, prompt, params[i % 3]) for i, prompt in enumerate(prompts)]


REQUESTS = requests_for(9)
Steps = dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]
"""By prompt: every verified draft, after the number of the response's tokens before it."""


@pytest.fixture(scope="module")
def telling() -> Iterator[Any]:
    """vLLM with the tuner in its scheduler and EAGLE, which keeps and tells its counts."""
    from tlt.engine.vllm import start
    from tlt.engine.vllm.inside.tuned import TunedScheduler

    quiet = start.arguments
    told = {"scheduler_cls": TunedScheduler, "disable_log_stats": False}
    told |= {"per_request_spec_decode_metrics": "detailed", "max_logprobs": 6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "arguments", lambda settings: {**quiet(settings), **told})
        engine = vllm_engine(BASE, "8x1x8", DRAFTER, 6, window=WINDOW, own_process=True)
    yield engine
    engine.close()


@pytest.fixture
def verified(telling: Any, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What the scheduler sends to be verified."""
    scheduler, found = telling.link._scheduler, Steps()
    schedule = scheduler.schedule

    def seen(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        for name, draft in output.scheduled_spec_decode_tokens.items():
            request = scheduler.requests[name]
            found.setdefault(tuple(request.prompt_token_ids), []).append(
                (request.num_output_tokens, tuple(draft))
            )
        return output

    monkeypatch.setattr(scheduler, "schedule", seen)
    return found


def happened(verified: Steps, own: Any, requests: Sequence[Request]) -> list[list[tuple[int, int]]]:
    """Returns (accepted, drafted) of every verification, by request."""
    longer = [replace(r, params=replace(r.params, max_tokens=r.params.max_tokens + SPARE)) for r in requests]
    right, found = {one.prompt_ids: one.token_ids for one in own.generate(longer)}, []
    for request in requests:
        tokens, steps = right[request.prompt_ids], []
        for place, draft in verified.get(request.prompt_ids, ()):
            agrees = [token == other for token, other in zip(draft, tokens[place:], strict=False)]
            steps.append(([*agrees, False].index(False), len(draft)))
        found.append(steps)
    return found


def counters(telling: Any) -> Counter[str]:
    """Returns vLLM's counters of drafts; those of a position as position-N."""
    found: Counter[str] = Counter()
    for metric in telling.link._llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name in ("drafts", "draft_tokens", "accepted_tokens"):
            found[name] = metric.value
        if name == "accepted_tokens_per_pos":
            found.update({f"position-{index}": value for index, value in enumerate(metric.values)})
    return found


def counted(steps: Sequence[tuple[int, int]], num_positions: int) -> Counter[str]:
    accepted, drafted = zip(*steps, strict=True)
    found = Counter(drafts=len(steps), draft_tokens=sum(drafted), accepted_tokens=sum(accepted))
    return found + Counter(f"position-{i}" for num in accepted for i in range(min(num, num_positions)))


def test_a_response_near_the_window_s_end_stops_nobody_s_drafts(
    telling: Any, own: Any, verified: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has a long prompt, and reaches the end early; vLLM would have the others verify zeros from then
    on."""
    monkeypatch.setattr(telling.link._scheduler, "tuner", FixedTuner(Strategy("learned", 4, 1, 4)))
    prompts = [request.prompt_ids for request in REQUESTS[:3]]
    prompts[0] = (prompts[0] * WINDOW)[: WINDOW // 2]
    rooms = [WINDOW - len(prompt) for prompt in prompts]
    requests = [
        replace(r, prompt_ids=prompt, params=replace(r.params, max_tokens=room))
        for r, prompt, room in zip(REQUESTS, prompts, rooms, strict=False)
    ]
    right = answers(own, requests)
    found = answers(telling, requests)
    assert {key: one.token_ids for key, one in found.items()} == {
        key: one.token_ids for key, one in right.items()
    }
    assert not any(set(draft) == {0} for steps in verified.values() for _, draft in steps)
    last = [draft for one in found.values() for draft in one.drafts if draft.place > rooms[2] - 8]
    assert sum(draft.num_accepted for draft in last) > 4


# ── vLLM's own requests, by seed ────────────────────────────────────────────────────────────────────────────

PROMPTS = [request.prompt_ids for request in REQUESTS]
NUM_LOGPROBS = (None, 0, 1, 5)
"""By request, in turn."""


TUNERS: dict[str, Any] = {
    "fixed": lambda: FixedTuner(Strategy("learned", 4, 1, 4)),
    "changing": lambda: RandomLengths("learned", 8, 3),
}


def ask(telling: Any, tuner: Any, numbers: Sequence[int | None] = NUM_LOGPROBS) -> list[Any]:
    """Asks vLLM with a seed and a number of log-probabilities for each prompt, while the scheduler's tuner is
    this one."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=1.0 if index % 2 else 0.7,
            seed=index,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            detokenize=False,
            logprobs=numbers[index % len(numbers)],
            prompt_logprobs=2 if index == 3 else None,
        )
        for index in range(len(PROMPTS))
    ]
    scheduler, llm = telling.link._scheduler, telling.link._llm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "tuner", tuner)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        found: list[Any] = llm.generate(asked, params, use_tqdm=False)
    return found


def served() -> list[Request]:
    """Returns the same requests as our own engine answers them."""
    params = [
        OurParams(1.0 if index % 2 else 0.7, max_tokens=NUM_TOKENS, seed=index)
        for index in range(len(PROMPTS))
    ]
    return [
        Request("served", 0, prompt, each, "generate") for prompt, each in zip(PROMPTS, params, strict=True)
    ]


@pytest.mark.parametrize("tuner", ["the server's", *TUNERS])
def test_what_vllm_counts_under_a_tuner_is_what_happened(
    telling: Any, own: Any, verified: Steps, tuner: str
) -> None:
    before = counters(telling)
    chooses = TUNERS[tuner]() if tuner in TUNERS else telling.link._scheduler.tuner
    told = [answer.outputs[0].spec_decode_metrics for answer in ask(telling, chooses)]
    want = happened(verified, own, served())
    every = [step for steps in want for step in steps]
    assert len(every) > (20 if tuner in TUNERS else 0)
    assert counters(telling) - before == counted(every, telling.link.max_depth)
    assert [list(zip(one.per_step_accepted, one.per_step_drafted, strict=True)) for one in told] == want


@pytest.mark.parametrize("tuner", TUNERS)
def test_log_probabilities_are_those_without_drafts(telling: Any, own: Any, tuner: str) -> None:
    right = {one.prompt_ids: one for one in own.generate(served())}
    alone, drafted = ask(telling, FixedTuner(Strategy.OFF)), ask(telling, TUNERS[tuner]())
    assert any(any(one.outputs[0].spec_decode_metrics.per_step_accepted) for one in drafted)
    for index, (without, found) in enumerate(zip(alone, drafted, strict=True)):
        ours, num = right[tuple(found.prompt_token_ids)], NUM_LOGPROBS[index % 4]
        assert tuple(found.outputs[0].token_ids) == tuple(without.outputs[0].token_ids) == ours.token_ids
        if num is None:
            assert found.outputs[0].logprobs is None
            continue
        for place, (one, other) in enumerate(
            zip(found.outputs[0].logprobs, without.outputs[0].logprobs, strict=True)
        ):
            assert len(one) in (max(num, 1), num + 1)
            assert {token: (s.logprob, s.rank) for token, s in one.items()} == {
                token: (pytest.approx(s.logprob, abs=1e-3), s.rank) for token, s in other.items()
            }
            drawn = one[ours.token_ids[place]]
            assert drawn.logprob == pytest.approx(ours.logprobs[place], abs=1e-3)
            assert drawn.rank >= 1
    (asked,) = (one for one in zip(alone, drafted, strict=True) if one[0].prompt_logprobs)
    for one, other in zip(asked[0].prompt_logprobs[1:], asked[1].prompt_logprobs[1:], strict=True):
        assert {token: s.logprob for token, s in one.items()} == pytest.approx(
            {token: s.logprob for token, s in other.items()}, abs=1e-3
        )


@pytest.mark.parametrize("tuner", [FixedTuner(Strategy.OFF), *(make() for make in TUNERS.values())])
def test_a_token_s_rank_does_not_depend_on_what_others_ask_for(telling: Any, tuner: Any) -> None:
    """Nobody here asks for other tokens' log-probabilities."""
    alone, beside = ask(telling, tuner, [0]), ask(telling, FixedTuner(Strategy.OFF), [5])
    for one, other in zip(alone, beside, strict=True):
        drawn = one.outputs[0].token_ids
        assert drawn == other.outputs[0].token_ids
        places = zip(drawn, one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
        assert all(these[token].rank == those[token].rank for token, these, those in places)

"""vLLM in our process, its drafter trained: everything that an engine promises, against our own engine
token for token."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.refused import refused
from tests.side_by_side import RandomLengths, Responses, answers, random_lengths, step_by_step
from tests.vllm.parts import BASE, DEPTH, DRAFTER, assert_equal, in_vllm, requests_for
from tlt.base.types import Finished, Request, SamplingParams
from tlt.drafter.formats.folder import load_drafter
from tlt.drafter.forms import new_model
from tlt.engine.build.model import load_model

pytestmark = in_vllm

MODEL = load_model(BASE, torch.float32)
REQUESTS = requests_for(24, 24, 1, MODEL.stop_ids, longest=40)
WINDOW = 400


def countdown(num: int, max_tokens: int, temperature: float = 1.0, samples: int = 1) -> list[Request]:
    """Requests that the model was trained for, so that its drafter is right most of the time."""
    assert MODEL.tokenizer is not None
    params = SamplingParams(temperature, max_tokens=max_tokens, stop_ids=MODEL.stop_ids, seed=3)
    prompts = [tuple(MODEL.tokenizer.encode_text(f"[{i + 1},{i + 3},7:{20 + i}]")) for i in range(num)]
    return [
        Request(f"c{i}", sample, ids, params) for i, ids in enumerate(prompts) for sample in range(samples)
    ]


def ended(engine: Any) -> Responses:
    """Takes one step; returns the responses that it ended."""
    return {(f.rollout.problem_id, f.rollout.sample_index): f.rollout for f in engine.step()}


def tokens_of(found: Responses) -> dict[tuple[str, int], tuple[int, ...]]:
    return {key: rollout.token_ids for key, rollout in found.items()}


@pytest.fixture(autouse=True)
def counts_anew(live: Any) -> None:
    assert live.is_idle
    live.stats = type(live.stats)()


def test_chains_of_one_length_change_no_token(live: Any, own: Any) -> None:
    assert_equal(REQUESTS, own, answers(live, REQUESTS), BASE)
    assert live.stats.num_drafted_tokens > 0


def test_another_length_at_every_step_changes_no_token(live: Any, own: Any) -> None:
    assert_equal(REQUESTS, own, step_by_step(live, REQUESTS, random_lengths(DEPTH, 5)), BASE)


def test_a_tuner_that_picks_at_random_changes_no_token(live: Any, own: Any) -> None:
    tuner, live.tuner = live.tuner, RandomLengths("learned", DEPTH, 7)
    requests = countdown(10, 60)
    assert_equal(requests, own, answers(live, requests), BASE)
    live.tuner = tuner
    assert {"off", "learned:1x1x1", "learned:4x1x4"} <= live.stats.by_strategy.keys()


def test_drafts_of_the_trained_drafter_are_accepted(live: Any, own: Any) -> None:
    """Where the temperature is high, guesses agree for the noise that they share with the target, and
    hardly else."""
    # our own engine: 4.86 and 2.43, and 2.04 without the noise
    for temperature, least in ((1.0, 4.5), (3.0, 2.2)):
        live.stats = type(live.stats)()
        requests = countdown(6, 60, temperature)
        assert_equal(requests, own, answers(live, requests), BASE)
        assert live.stats.accept_length > least


def test_a_response_ends_where_the_window_does(live: Any, own: Any) -> None:
    (one,) = countdown(1, 1000)
    prompt = (one.prompt_ids * 60)[: WINDOW - 9]
    request = dataclasses.replace(one, prompt_ids=prompt, params=dataclasses.replace(one.params, stop_ids=()))
    (found,) = live.generate([request])
    assert (len(found.token_ids), found.finish_reason) == (9, "length")
    short = dataclasses.replace(request, params=dataclasses.replace(request.params, max_tokens=9))
    assert found.token_ids == next(iter(own.generate([short]))).token_ids


@pytest.mark.parametrize("goes", ["to vLLM", "from vLLM"])
def test_responses_go_on_in_the_other_engine(live: Any, own: Any, goes: str) -> None:
    requests = countdown(6, 50)
    expected = answers(own, requests)
    first, second = (own, live) if goes == "to vLLM" else (live, own)
    found = {}
    first.add(requests)
    for _ in range(4):
        found |= ended(first)
    moved = first.withdraw(range(0, len(first.running), 2))
    assert len(moved) >= 2
    assert all(request.token_ids for request in moved)
    second.add(moved)
    for engine in (first, second):
        while not engine.is_idle:
            found |= ended(engine)
    assert tokens_of(found) == tokens_of(expected)
    pairs = [pair for key in found for pair in zip(found[key].logprobs, expected[key].logprobs, strict=True)]
    assert max(abs(a - b) for a, b in pairs) < 2e-4


def test_nothing_is_left_after_an_abort(live: Any, own: Any) -> None:
    requests = countdown(12, 50)
    live.add(requests)
    for _ in range(3):
        live.step()
    live.abort()
    assert live.is_idle
    assert not live.link._engine.has_unfinished_requests()
    assert_equal(requests[:3], own, answers(live, requests[:3]), BASE)


def features_of(token_ids: tuple[int, ...]) -> Tensor:
    """transformers' last hidden states."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    with torch.inference_mode():
        found: Tensor = model.model(torch.tensor([token_ids])).last_hidden_state[0]
    return found


def captured_of(live: Any, requests: list[Request]) -> list[Finished]:
    live.add(requests)
    found = []
    while not live.is_idle:
        found += live.step(captures=True)
    return found


def test_what_was_captured_is_what_the_target_computes(live: Any) -> None:
    """Speculation is on: the rows of rejected drafts have been written over."""
    for finished in captured_of(live, countdown(6, 30)):
        rollout = finished.rollout
        expected_TF = features_of((*rollout.prompt_ids, *rollout.token_ids))[:-1]
        assert finished.captured_TF is not None
        torch.testing.assert_close(finished.captured_TF, expected_TF, rtol=1e-3, atol=2e-3)


def test_what_vllm_s_prefix_cache_holds_is_not_taken_for_another_prompt_s(live: Any) -> None:
    """One at a time, so all have one slot: the third begins with 128 positions that never pass through."""
    live.load_policy(MODEL.tensors)  # what other tests have left in the cache is gone
    ids = countdown(1, 1)[0].prompt_ids
    params = SamplingParams(max_tokens=12, seed=2)
    # with a drafter vLLM reads the last whole block again
    prompts = {"a": (ids * 30)[:300], "b": (ids[::-1] * 30)[:300]}
    requests = [Request(name, i, prompts[name], params) for i, name in enumerate("aba")]
    found = [captured_of(live, [one])[0].captured_TF for one in requests]
    assert [captured_TF is None for captured_TF in found] == [False, False, True]


def changed_policy(scale: float) -> dict[str, Tensor]:
    """Weights that say something else nearly everywhere."""
    generator = torch.Generator().manual_seed(4)
    return {
        name: tensor + scale * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 2
        else tensor
        for name, tensor in MODEL.tensors.items()
    }


def test_a_policy_that_is_pushed_is_the_one_that_answers(live: Any, own: Any) -> None:
    requests = countdown(6, 25, temperature=0.0)
    long = (requests[0].prompt_ids * 30)[:300]  # vLLM's prefix cache holds its first 128 positions
    requests.append(dataclasses.replace(requests[0], problem_id="long", prompt_ids=long))
    before = answers(own, requests)
    assert_equal(requests, own, answers(live, requests), BASE)
    for version, policy in ((1, changed_policy(0.7)), (2, dict(MODEL.tensors))):
        live.load_policy(policy, version)
        own.load_policy(policy, version)
        found = answers(live, requests)
        assert_equal(requests, own, found, BASE)
        assert {rollout.policy_version for rollout in found.values()} == {version}
        num_same = sum(found[key].token_ids == before[key].token_ids for key in found)
        assert num_same == (0 if version == 1 else len(found))


def test_a_drafter_that_is_pushed_in_mid_rollout_changes_acceptance_and_no_token(live: Any, own: Any) -> None:
    requests, trained = countdown(8, 80), load_drafter(DRAFTER, MODEL.config).tensors
    expected = answers(own, requests)
    spoiled = new_model(live.drafter.shape).initialize(9).state_dict()
    found = {}
    live.add(requests)
    lengths = []
    for tensors, version in ((spoiled, 1), (trained, 2)):
        live.stats = type(live.stats)()
        for _ in range(6):
            found |= ended(live)
        lengths.append(live.stats.accept_length)
        live.drafter.load(tensors, version)
    live.stats = type(live.stats)()
    while not live.is_idle:
        found |= ended(live)
    lengths.append(live.stats.accept_length)
    assert tokens_of(found) == tokens_of(expected)
    assert lengths[1] < 2 < 3.5 < min(lengths[0], lengths[2])


def spoil_caches(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.fill_(math.nan)


def test_a_cache_that_a_broken_policy_has_filled_is_clean_after_the_next_policy(live: Any, own: Any) -> None:
    name = next(name for name in MODEL.tensors if name.endswith("layers.3.mlp.down_proj.weight"))
    live.load_policy({**MODEL.tensors, name: MODEL.tensors[name] * math.nan}, 5)
    with refused("policy 5 gives logits that are not finite"):
        answers(live, countdown(2, 10))
    live.abort()
    live.link._llm.collective_rpc(spoil_caches)  # as if it had filled every block
    live.load_policy(dict(MODEL.tensors), 0)
    requests = countdown(12, 40, temperature=0.0)
    assert_equal(requests, own, answers(live, requests), BASE)

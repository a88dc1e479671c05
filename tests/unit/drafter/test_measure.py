"""How good a drafter is: the measure against forwards and sums written out."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.lossless.helpers import CONFIG
from tests.unit.drafter.parts import POLICY
from tests.unit.drafter.training_parts import Parts, make_rollouts
from tlt.base.types import Rollout
from tlt.drafter.drafting.retrieval.suffix_index import count_retrieved
from tlt.drafter.measure import (
    ARRIVAL_TOKENS,
    READ_FOR_EACH,
    Measurement,
    distribution,
    draw_counts,
    read_sample,
)
from tlt.models.attention import PackedCausal


def test_the_measure_is_the_overlap_of_target_and_drafter_position_by_position() -> None:
    parts, rollouts = Parts(), make_rollouts(3)
    tally = parts.measure(rollouts, 0.7)
    total, count = 0.0, 0
    for rollout in rollouts:
        tokens = torch.tensor([*rollout.prompt_ids, *rollout.token_ids])
        with torch.no_grad():
            attend = PackedCausal(CONFIG, [len(tokens)])
            features = POLICY(tokens, attend.positions(), attend)
            logits = POLICY.logits(features) / 0.7
            attend = PackedCausal(parts.model.config.layer, [len(tokens) - 1])
            embeddings = POLICY.model.embed_tokens(tokens[1:])
            hidden = parts.model.double()(embeddings, features[:-1], attend.positions(), attend)
            drafted = POLICY.logits(hidden) / 0.7
        for position in range(4, len(tokens)):
            p, q = logits[position - 1].softmax(0), drafted[position - 2].softmax(0)
            total, count = total + float(torch.minimum(p, q).sum()), count + 1
    assert tally.num_positions == count
    assert tally.accepted == pytest.approx(total, abs=1e-4)


def test_at_temperature_0_the_measure_counts_equal_first_choices() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 1.0, 0.0]])
    assert distribution(logits, 0).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert distribution(torch.tensor([[1.0, math.nan]]), 0).isnan().any()


def test_the_sample_stays_within_its_tokens_and_prefers_no_response() -> None:
    rollouts = make_rollouts(10)
    seen = set()
    for seed in range(40):
        counts = draw_counts(rollouts, 60, random.Random(seed))
        assert sum(counts.values()) == 60
        seen |= counts.keys()
    assert seen == set(range(10))


def test_a_prompt_longer_than_the_sample_leaves_something_to_measure() -> None:
    (rollout,) = make_rollouts(1)
    counts = draw_counts([replace(rollout, prompt_ids=(3, 4) * 400)] * 2, 30, random.Random(0))
    assert list(counts.values()) == [24]
    parts, prompt_ids = Parts(), tuple(range(1, 61)) * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tlt.drafter.measure.CANARY_TOKENS", 30)
        check = parts.training.publish_and_measure(
            [replace(r, prompt_ids=prompt_ids) for r in make_rollouts(2)], 0, 1.0
        )
    assert 0 < check.acceptance < 1


@pytest.mark.parametrize(("num_prompt", "num_response"), [(8000, 1), (2000, 1), (300, 2), (40, 1), (2, 1)])
@pytest.mark.parametrize("max_tokens", [256, 16])
def test_what_is_read_is_bounded_however_long_prompts_are(
    num_prompt: int, num_response: int, max_tokens: int
) -> None:
    (rollout,) = make_rollouts(1)
    asked = replace(rollout, prompt_ids=(3,) * num_prompt, token_ids=rollout.token_ids[:num_response])
    counts = draw_counts([asked] * 400, max_tokens, random.Random(0))
    num_read = sum(num_prompt + count for count in counts.values())
    assert num_read <= max(READ_FOR_EACH * max_tokens, num_prompt + num_response)
    whole = min(max_tokens, 400 * num_response)
    most = READ_FOR_EACH * max_tokens // (num_prompt + num_response) * num_response
    assert sum(counts.values()) == min(whole, max(most, num_response))


def test_where_acceptance_is_not_due_the_copies_are_compared_without_reading_long_prompts() -> None:
    copies = Parts().training.copies
    rollouts = [replace(one, prompt_ids=(3, 4) * 2000) for one in make_rollouts(3)]
    measurement = Measurement(copies, rollouts, 1.0, random.Random(0), is_due=False)
    assert measurement.sample is not None
    assert sum(measurement.sample.lengths) <= READ_FOR_EACH * ARRIVAL_TOKENS
    assert measurement.tally().distance < 1e-4
    with torch.no_grad():
        next(copies.model.parameters()).add_(1.0)
    assert Measurement(copies, rollouts, 1.0, random.Random(0), is_due=False).tally().distance > 1e-4


@pytest.mark.parametrize("at_once", [1, 30, 75, 200])
def test_a_sample_read_in_parts_is_that_read_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, rollouts, read = Parts(), make_rollouts(5), list[int]()
    counts = draw_counts(rollouts, 100, random.Random(1))
    target, capture = parts.training.copies.target, parts.model.config.capture
    whole = read_sample(rollouts, counts, target, capture, 0.7)
    forward = target.forward_capturing

    def watched(ids: torch.Tensor, *rest: Any) -> Any:
        read.append(len(ids))
        return forward(ids, *rest)

    monkeypatch.setattr(target, "forward_capturing", watched)
    monkeypatch.setattr("tlt.drafter.measure.READ_AT_ONCE", at_once)
    found = read_sample(rollouts, counts, target, capture, 0.7)
    assert sum(read) == sum(whole.lengths)
    assert all(num <= max(at_once, *whole.lengths) for num in read)
    assert (len(read) > 1) is (at_once < sum(whole.lengths))
    assert torch.equal(found.token_ids_N, whole.token_ids_N)
    assert (found.lengths, found.anchors) == (whole.lengths, whole.anchors)
    torch.testing.assert_close(found.captured_NF, whole.captured_NF)
    torch.testing.assert_close(found.target_RV, whole.target_RV)


def test_retrieval_is_counted_where_a_response_or_its_sibling_has_said_the_words_before() -> None:
    words = tuple(range(10, 22))

    def rollout(index: int, response: tuple[int, ...]) -> Rollout:
        return Rollout("p", index, (1, 2), response, (0.0,) * len(response), "stop", 0)

    repeating = rollout(0, words + words)
    assert count_retrieved([repeating], [24]) == 8  # all of the second time but the anchor
    assert count_retrieved([repeating], [12]) == 0
    ahead = [rollout(0, words), rollout(1, (30, 31, 32, *words))]  # three tokens behind its sibling
    assert count_retrieved(ahead, [0, 15]) == 8
    assert count_retrieved(ahead, [12, 0]) == 0

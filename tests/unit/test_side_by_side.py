"""Two engines' responses side by side: a near-tie is told from a fault."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.lossless.helpers import CONFIG, VOCAB, make_engine, make_policy, make_requests
from tests.side_by_side import NEAR_TIE, compare, first_difference, margin_of, random_lengths
from tlt.base.types import Request, SamplingParams
from tlt.models.hf.weights import save_model
from tlt.speculation.law.sampling import gumbel_noise, keys_tensor


def request_with(params: SamplingParams) -> Request:
    return Request("p", 0, (1, 2), params)


def logits_with_gap(request: Request, gap: float, others: float = -50.0) -> torch.Tensor:
    """Tokens 3 and 4 whose scores differ by `gap` under the law; all others are far below."""
    noise_V = gumbel_noise(keys_tensor([request.noise_key]), torch.tensor([[9]]), VOCAB)[0, 0].double()
    logits_V = torch.full((VOCAB,), others, dtype=torch.float64)
    logits_V[3], logits_V[4] = 10 - noise_V[3], 10 - noise_V[4] - gap
    return logits_V


@pytest.mark.parametrize("gap", [1e-5, 0.3])
def test_a_margin_is_the_difference_of_the_scores(gap: float) -> None:
    request = request_with(SamplingParams(1.0, seed=2))
    assert margin_of(logits_with_gap(request, gap), request, 9, (3, 4)) == pytest.approx(gap, abs=1e-9)
    assert margin_of(logits_with_gap(request, gap), request, 9, (4, 3)) == pytest.approx(gap, abs=1e-9)
    assert margin_of(logits_with_gap(request, gap), request, 9, (3, 5)) > 1  # 5 is far from being drawn


def test_two_tokens_that_tie_below_a_third_are_no_near_tie() -> None:
    request = request_with(SamplingParams(1.0, seed=2))
    logits_V = logits_with_gap(request, 1e-5)
    logits_V[7] = 100
    assert margin_of(logits_V, request, 9, (3, 4)) > 1


def test_at_temperature_0_noise_does_not_count() -> None:
    logits_V = torch.zeros(VOCAB, dtype=torch.float64)
    logits_V[5], logits_V[6] = 3.0, 3.0 - 1e-5
    assert margin_of(logits_V, request_with(SamplingParams(0.0)), 9, (5, 6)) == pytest.approx(1e-5, abs=1e-9)


def test_a_token_that_truncation_removes_is_a_fault_and_one_on_its_border_is_not() -> None:
    logits_V = torch.arange(VOCAB, 0, -1, dtype=torch.float64)
    request = request_with(SamplingParams(1.0, top_k=3))
    assert margin_of(logits_V, request, 9, (0, 20)) == float("inf")
    logits_V[3] = logits_V[2] - 1e-5  # the fourth, as likely as the third
    assert margin_of(logits_V, request, 9, (0, 3)) == 0.0


def test_a_first_difference_may_be_an_end() -> None:
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 5, 3)) == 1
    assert first_difference((1, 2, 3), (1, 2)) == 2


def test_responses_are_compared_up_to_their_first_difference(tmp_path: Path) -> None:
    policy = make_policy()
    save_model(tmp_path / "model", CONFIG, dict(policy.state_dict()), dtype=torch.float64, source=None)
    requests = make_requests(num_problems=4, num_samples=2, seed=5)
    ours = {(r.problem_id, r.sample_index): r for r in make_engine(policy).generate(requests)}
    same = compare(requests, ours, ours, tmp_path / "model")
    assert (same.num_equal, same.share, same.logprob_gap, same.differences) == (len(requests), 1.0, 0.0, ())
    key = max(ours, key=lambda k: len(ours[k].token_ids))
    changed = list(ours[key].token_ids)
    changed[2] = (changed[2] + 1) % VOCAB
    longer = next(k for k in ours if k != key)
    theirs = ours | {
        key: dataclasses.replace(ours[key], token_ids=tuple(changed)),
        longer: dataclasses.replace(
            ours[longer], token_ids=(*ours[longer].token_ids, 3), logprobs=(*ours[longer].logprobs, -1.0)
        ),
    }
    found = compare(requests, ours, theirs, tmp_path / "model")
    assert found.num_equal == len(requests) - 2
    assert found.num_tokens == same.num_tokens - len(changed) + 3 + 1
    assert {(d.problem_id, d.sample_index, d.position) for d in found.differences} == {
        (*key, 2),
        (*longer, len(ours[longer].token_ids)),
    }
    assert all(d.margin > NEAR_TIE and not d.is_near_tie for d in found.differences)


def test_draft_lengths_are_drawn_again_the_same() -> None:
    first, second = random_lengths(4, 1), random_lengths(4, 1)
    drawn = [next(first) for _ in range(60)]
    assert drawn == [next(second) for _ in range(60)]
    assert set(drawn) == {0, 1, 2, 3, 4}

"""Two engines' responses side by side: a near-tie is told from a fault."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tests.lossless.helpers import CONFIG, VOCAB, make_engine, make_policy, make_requests
from tests.side_by_side import NEAR_TIE, compare
from tlt.models.hf.weights import save_model


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

"""What tuners and drafters have learned while drafting survives a restart, as JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from tests.unit.drafter.test_ngram import CHAIN, propose, request, rollout_of, whole_drafts
from tests.unit.drafter.training_parts import Parts
from tests.unit.speculation.tuner.test_tuner import ALL, Machine, play
from tlt.base.speculation import Adaptive
from tlt.drafter.drafting.retrieval.ngram import NgramDrafter
from tlt.drafter.drafting.retrieval.suffix_index import _MAX_TEXTS
from tlt.speculation.tuner.protocol import BatchState
from tlt.speculation.tuner.tuner import make_tuner


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize("name", ["cost-model", "beg-mab"])
def test_a_restored_tuner_chooses_as_the_one_before_would_have(name: str) -> None:
    made = [make_tuner(Adaptive(), ALL, name) for _ in range(3)]
    before, again, fresh = (tuner for tuner in made if tuner is not None)
    play(before, Machine({"learned": 0.8, "ngram": 0.5, "hybrid": 0.7}, 16.0), [32, 8, 3, 1] * 40)
    again.restore(through_json(before.counters()))
    assert again.counters() == before.counters() != fresh.counters()
    sizes = random.Random(1).choices((1, 2, 7, 30), k=60)  # of another policy: the evidence ages
    chosen = [[tuner.choose(BatchState(size, 3, 2)) for size in sizes] for tuner in (before, again)]
    assert chosen[0] == chosen[1]
    assert len({*chosen[0]}) > 1


def taught(texts: dict[str, list[list[int]]], max_tokens: int = 10**6) -> NgramDrafter:
    drafter = whole_drafts(max_tokens=max_tokens)
    for name, rows in texts.items():
        for index, row in enumerate(rows):
            asked = request(name, index, row[:2])
            drafter.admit(0, asked)
            drafter.finish(0, rollout_of(asked, row))
    return drafter


def test_restored_retrieval_finds_what_was_said_before() -> None:
    texts = {"p0": [[1, 2, *range(10, 30)], [1, 2, 40, 41, 42, 43, 44, 45]], "q": [[1, 2, 3, 4, 5, 6]]}
    before, again = taught(texts), whole_drafts()
    again.restore([through_json(before.counters())])
    assert again.counters() == before.counters()
    assert again.num_tokens == before.num_tokens
    row = [1, 2, 7, 12, 13, 14, 15]
    for drafter in (before, again):
        drafter.admit(0, request("p0", 2))
        assert propose(drafter, [row], CHAIN).tokens_BN.tolist() == [[15, 16, 17, 18, 19]]


def test_what_ranks_that_are_no_more_knew_is_taken_over_within_the_bound() -> None:
    one, other = (
        taught({"p": [[1, 2, *range(10, 30)]]}),
        taught({"p": [[1, 2, *range(50, 70)]], "q": [[*range(90)]]}),
    )
    heir = whole_drafts()
    heir.restore([through_json(one.counters()), through_json(other.counters())])
    assert heir.num_tokens == one.num_tokens + other.num_tokens
    assert list(heir.problems) == ["q", "p"], "its own is the latest"
    small = whole_drafts(max_tokens=60)
    small.restore([one.counters(), other.counters()])
    assert list(small.problems) == ["p"]


def test_a_problem_keeps_its_latest_texts_alone() -> None:
    before = taught({"p": [[1, 2, 3, 4, 5, number] for number in range(_MAX_TEXTS + 9)]})
    again = whole_drafts()
    again.restore([through_json(before.counters())])
    assert [text[-1] for text in again.problems["p"].texts.values()] == list(range(9, _MAX_TEXTS + 9))


def test_a_restored_hybrid_trusts_its_drafters_as_before() -> None:
    parts, again = Parts(), Parts()
    hybrid = parts.hybrid
    assert hybrid.learned.calibration is not None
    hybrid.learned.calibration.accepted[7] += 20
    hybrid.learned.calibration.seen[7] += 30
    hybrid.learned.calibration.age(1.0)
    hybrid.learned.tau_search.tau, hybrid.learned.tau_search.hits[2] = 0.45, 3.5
    hybrid.learned_accepted = 2.25
    hybrid.ngram.hits[3] = [5.0, 7.5]
    again.hybrid.restore([through_json(hybrid.counters())])
    assert again.hybrid.counters() == hybrid.counters() != Parts().hybrid.counters()
    assert again.hybrid.learned.calibration is not None
    assert torch.equal(again.hybrid.learned.calibration.table, hybrid.learned.calibration.table)

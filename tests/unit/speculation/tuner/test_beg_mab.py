"""The bandit of the TLT paper, behind `rollout.tuner = "beg-mab"`."""

from __future__ import annotations

import random
import statistics

from tests.lossless.helpers import make_engine, make_policy, make_requests, tokens_of
from tests.unit.speculation.tuner.test_tuner import ALL, ARMS, CHAINS, Machine, play, share_of_best
from tlt.base.strategy import Strategy
from tlt.speculation.tuner.beg_mab import BegMab, groups_of
from tlt.speculation.tuner.cost_model import CostModel
from tlt.speculation.tuner.protocol import BatchState, StepOutcome
from tlt.speculation.tuner.tuner import default_arms

GOOD = {"learned": 0.8, "ngram": 0.4, "hybrid": 0.8}


def test_it_prefers_the_best_median_of_its_own_bucket() -> None:
    a, b = Strategy("learned", 4, 1, 4), Strategy("learned", 8, 1, 8)
    mab = BegMab([(1, [a, b]), (5, [Strategy.OFF, a])], epsilon=0.0, window=5)
    batch = BatchState(2, 0, 0)
    for reward_a, reward_b in (
        (3, 2),
        (3, 2),
        (1, 90),
        (3, 2),
        (3, 2),
    ):  # one lucky step of b changes no median
        for arm, reward in ((a, reward_a), (b, reward_b)):
            mab.observe(arm, batch, StepOutcome(4, (reward, reward), (4, 4), 1.0))
    assert mab.choose(batch).strategy == a
    for _ in range(9):  # what the step drafted is another arm's work
        mab.observe(b, batch, StepOutcome(4, (90, 90), (4, 4), 1.0, drafted_next=a))
    assert mab.choose(batch).strategy == a
    for _ in range(3):
        mab.observe(a, batch, StepOutcome(4, (0, 0), (4, 4), 1.0))
    assert mab.choose(batch).strategy == b
    assert mab.choose(BatchState(7, 0, 0)).strategy == Strategy.OFF, "the other bucket has seen nothing yet"


def test_buckets_hold_several_arms_and_larger_batches_verify_fewer_tokens() -> None:
    for kinds in (("ngram",), ALL):
        groups = groups_of(default_arms(kinds))
        assert [smallest for smallest, _ in groups] == [1, 2, 5, 21]
        assert all(len(arms) > 1 for _, arms in groups)
        largest = [max(arm.budget for arm in arms) for _, arms in groups]
        assert largest == sorted(largest, reverse=True)


def test_a_decision_is_a_pure_function_of_the_rewards() -> None:
    mab = BegMab(groups_of(ARMS))
    play(mab, Machine(GOOD, 25.0), [4] * 300)
    assert len({mab.decide(1, 0.5, 0.1) for _ in range(5)}) == 1
    assert {mab.decide(1, 0.0, pick / 50) for pick in range(50)} == set(mab.groups[1][1]), (
        "exploring reaches every arm"
    )


def test_on_the_same_machines_it_loses_more_to_the_best_arms_than_the_cost_model() -> None:
    sizes = [24] * 150 + [8] * 150 + [2] * 300 + [1] * 600
    ours, theirs = [], []
    for seed in range(2):
        for shares, tuner in (
            (ours, CostModel(CHAINS)),
            (theirs, BegMab(groups_of(ARMS), rng=random.Random(seed))),
        ):
            machine = Machine(GOOD, 25.0, seed)
            shares.append(share_of_best(machine, play(tuner, machine, sizes), sizes, ARMS))
    assert statistics.mean(ours) > statistics.mean(theirs)


def test_its_choices_change_no_token() -> None:
    texts = []
    for tuner in (None, BegMab(groups_of(default_arms(ALL)), epsilon=0.5)):
        engine = make_engine(make_policy(), tuner, max_batch_size=5)
        texts.append(tokens_of(engine, make_requests(6, 1, seed=0)))
    assert len(engine.stats.by_strategy) > 2
    assert texts[0] == texts[1]


def test_every_bucket_has_arms_where_all_are_short() -> None:
    """vLLM drafts chains of at most rollout.vllm.max_draft_tokens."""
    for longest in (1, 4, 8, 15):
        groups = groups_of(default_arms(("learned",), longest, trees=False))
        for bucket, (_, arms) in enumerate(groups):
            assert any(not arm.is_off for arm in arms)
            for explore in (0.0, 1.0):
                assert BegMab(groups).decide(bucket, explore, 0.99) in arms

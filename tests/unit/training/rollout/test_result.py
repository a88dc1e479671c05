"""A batch that is not whole is not trained on."""

from __future__ import annotations

import math

import pytest

from tlt.base.records import AheadReport, DrafterCheck, DrafterReport, IdleStretch, IdleUse
from tlt.base.strategy import Strategy
from tlt.base.types import DraftOutcome, Reward, Rollout, Turns
from tlt.engine.stats import EngineStats
from tlt.speculation.tuner.protocol import Choice, StepOutcome
from tlt.training.idle.choice import IdleFacts
from tlt.training.rollout.result import (
    IncompleteBatch,
    PhaseResult,
    ReplicaReport,
    check_complete,
    turns_record,
)

A, B, C, Z = ("a", 0), ("a", 1), ("b", 0), ("z", 0)
ONE_B = r"such as \('a', 1\)"


def test_what_was_asked_for_may_come_from_any_rank_in_any_order() -> None:
    check_complete([A, B, C], [([C], [C]), ([], []), ([B, A], [A, B])], "rollout 3")


@pytest.mark.parametrize(
    ("brought", "message"),
    [
        (
            [([A], [A]), ([C], [C])],
            rf"1 of 3 requests have no response, {ONE_B} \(responses: 1 by rank 0, 1 by",
        ),
        ([([A, B], [A]), ([C], [C])], f"1 of 3 requests have no reward, {ONE_B}"),
        ([([A, B], [A, B]), ([B, C], [B, C])], f"1 of 3 requests were answered too often, {ONE_B}"),
        ([([A, B, C, Z], [A, B, C])], r"1 of 3 requests were answered too often, such as \('z', 0\)"),
        ([([], [])], "3 of 3 requests have no response"),
    ],
)
def test_anything_else_is_refused_with_its_phase_the_first_response_and_the_ranks(
    brought: list, message: str
) -> None:
    with pytest.raises(IncompleteBatch, match=f"^rollout 3: {message}"):
        check_complete([A, B, C], brought, "rollout 3")


@pytest.mark.parametrize(("recalled", "rate"), [(0, 6.0), (1, math.nan), (11, math.nan), (12, math.nan)])
def test_a_phase_that_read_tokens_of_the_journal_has_no_rate(recalled: int, rate: float) -> None:
    rollouts = [Rollout("a", i, (1,), (2,) * 6, (0.0,) * 6, "stop", 0) for i in range(2)]
    replica = ReplicaReport(0.0, 1.5, 2.0, EngineStats(), DrafterReport())
    phase = PhaseResult(rollouts, [Reward(1.0, True)] * 2, [replica], recalled_tokens=recalled)
    found = phase.rollout_record().tokens_per_second
    assert found == pytest.approx(rate, nan_ok=True)


def test_the_figures_of_a_phase_are_sums_over_replicas_and_end_with_the_last_token_of_all() -> None:
    """Replica 0 is busy to the end; 1 trains, generates ahead and trains again; 2 joins two rounds."""
    stats = EngineStats()
    busy = ReplicaReport(10.0, 18.0, 21.0, stats, DrafterReport())
    train = DrafterReport(4, 300, 3.0, 2.0, captured_tokens=5, recomputed_tokens=7, preempted_at=18.25)
    uses = (
        IdleStretch(IdleUse.TRAIN, 14.0, 16.5),
        IdleStretch(IdleUse.AHEAD, 16.5, 17.5),
        IdleStretch(IdleUse.TRAIN, 17.5, 18.25),
    )
    trains = ReplicaReport(
        11.0, 14.0, 20.0, stats, train, num_migrated=2, ahead=AheadReport(9, 40, 1.0), idle=uses
    )
    first = ReplicaReport(
        10.5,
        12.0,
        13.0,
        stats,
        DrafterReport(1, 100, 0.5, 1.0, captured_tokens=1),
        ahead=AheadReport(1, 2, 0.1),
    )
    second = ReplicaReport(13.0, 16.0, 20.0, stats, DrafterReport(2, 100, 4.0, 5.0, preempted_at=17.0))
    joined = first.then(second, last_token_of_all=12.5)
    assert (joined.start, joined.gap_seconds, joined.gap_training) == (10.5, 0.5, 0.5)

    rollouts = [Rollout("a", i, (1,), (2,) * 6, (0.0,) * 6, "stop", 0) for i in range(2)]
    check = DrafterCheck(acceptance=0.6, before=0.5, publish_seconds=0.25)
    phase = PhaseResult(rollouts, [Reward(1.0, True)] * 2, [busy, trains, joined], check)
    assert (phase.seconds, phase.last_token) == (11.0, 18.0)
    record = phase.drafter_record()
    assert (record.tokens, record.captured_tokens, record.recomputed_tokens) == (500, 6, 7)
    assert record.loss == pytest.approx((300 * 2.0 + 100 * 1.0 + 100 * 5.0) / 500)
    assert record.train_seconds == 3.0 + 2.5, (
        "what a replica trains after the last token of all fills no idle time"
    )
    idle = phase.idle_record({})
    assert idle.seconds == 4.0 + 2.5
    assert idle.harvested_share == pytest.approx(5.5 / 6.5)
    assert idle.preemption_seconds == (0.25,)
    assert idle.seconds_by_use == {"ahead": 1.0, "train": 3.25}
    assert (idle.ahead_seconds, idle.ahead_tokens) == (1.1, 42)
    assert phase.rollout_record().num_migrated == 2
    facts = phase.idle_facts(num_offered=9, steps_left=4)
    assert (facts.ahead_tokens, facts.ahead_seconds, facts.offered_tokens, facts.steps_left) == (
        42,
        1.1,
        9,
        4,
    )
    assert (facts.rollout_seconds, facts.busy_ranks) == (11.0, pytest.approx(3 - 6.5 / 11.0))
    assert (facts.train_seconds, facts.publish_seconds) == (3.0 + 0.5 + 4.0, 0.25)
    assert (facts.acceptance_before, facts.acceptance) == (0.5, 0.6)


def test_drafts_are_told_by_turn() -> None:
    def rollout(turns: Turns | None, *accepted: tuple[int, int]) -> Rollout:
        drafts = tuple(DraftOutcome(place, "ngram", 4, num, None) for place, num in accepted)
        return Rollout("1", 0, (3,), (5,) * 20, (0.0,) * 20, "stop", 0, drafts, turns=turns)

    several = rollout(Turns(given=((4, 8), (12, 14))), (0, 1), (2, 0), (8, 3), (15, 4))
    one = rollout(Turns(), (0, 2), (9, 0))
    told = turns_record([several, one], 0)
    assert told.first_acceptance_length == 1 + (1 + 0 + 2 + 0) / 4
    assert told.later_acceptance_length == 1 + (3 + 4) / 2
    assert math.isnan(turns_record([one], 0).later_acceptance_length)
    assert math.isnan(turns_record([rollout(None, (0, 2))], 0).first_acceptance_length)


def test_what_references_have_won_is_known_where_a_tuner_predicts() -> None:
    def facts(predicted: float | None = 9.0) -> IdleFacts:
        stats = EngineStats(won_seconds=4.0)
        stats.record_step(Choice(Strategy.OFF, predicted), StepOutcome(3, (), (), 1.0), 1)
        stats.record_step(Choice(Strategy.OFF), StepOutcome(3, (), (), 1.0), 1)  # before a prediction
        phase = PhaseResult([], [], [ReplicaReport(0.0, 5.0, 6.0, stats, DrafterReport())])
        return phase.idle_facts(num_offered=50)

    assert facts().won_seconds == pytest.approx(4.0)
    assert facts(predicted=None).won_seconds is None, "no tuner predicts"
    assert facts().offered_tokens == 50

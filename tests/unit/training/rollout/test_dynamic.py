"""Dynamic sampling: what is drawn again, under which keys, and what the update takes. Pure functions, then
a phase."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.lossless.helpers import STOP, make_engine, make_policy
from tests.unit.training.rollout.phase_parts import Scorers, make_phase
from tlt.base.records import DrafterReport
from tlt.base.strategy import Strategy
from tlt.base.types import Problem, Reward, Rollout, SamplingParams
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.speculation.tuner.tuner import FixedTuner
from tlt.training.build.problems import problems_of_step, spare_problems
from tlt.training.idle.protocol import NO_TRAINING, DrafterTraining
from tlt.training.idle.work import IdleWork
from tlt.training.rollout.dynamic import DynamicSampling, Group, GroupRequest, flatten
from tlt.training.rollout.phase import StopRequested
from tlt.training.rollout.result import PhaseResult, ReplicaReport, join_rounds
from tlt.training.rollout.work_queue import local_work_queue

POLICY = make_policy()
PROBLEMS = [Problem(f"p{i}", (3, 4, 5 + i)) for i in range(12)]


def answer(request: GroupRequest, *values: float | None) -> Group:
    """A group of these rewards; None: could not be scored."""
    rewards = tuple(Reward(0.0 if v is None else v, False, "time-out" if v is None else "") for v in values)
    indexes = range(request.first_sample, request.first_sample + len(values))
    rollouts = tuple(
        Rollout(request.problem.problem_id, i, request.problem.prompt_ids, (1,), (0.0,), "stop", 0)
        for i in indexes
    )
    return Group(request, rollouts, rewards)


def rule(num_groups: int, spare: Sequence[Problem], max_resamples: int = 9) -> DynamicSampling:
    return DynamicSampling(num_groups, 2, spare, max_resamples)


def test_a_group_has_a_signal_where_two_scores_differ() -> None:
    request = GroupRequest(PROBLEMS[0])
    assert answer(request, 0.0, 1.0).has_signal
    assert not answer(request, 1.0, 1.0).has_signal
    assert not answer(request, 1.0, None).has_signal, "what could not be scored is no second score"


def test_groups_without_a_signal_are_replaced_by_the_next_spare_problems() -> None:
    sampling = rule(3, PROBLEMS[3:])
    groups = [
        answer(GroupRequest(PROBLEMS[0]), 0, 1),
        answer(GroupRequest(PROBLEMS[1]), 0, 0),
        answer(GroupRequest(PROBLEMS[2]), 1, 1),
    ]
    group_requests = sampling.next_requests(groups, 1)
    assert group_requests == [GroupRequest(PROBLEMS[3]), GroupRequest(PROBLEMS[4])]
    groups += [answer(group_requests[0], 1, 1), answer(group_requests[1], 0, 1)]
    assert sampling.next_requests(groups, 2) == [GroupRequest(PROBLEMS[5])]
    groups.append(answer(GroupRequest(PROBLEMS[5]), 0, 1))
    assert sampling.next_requests(groups, 3) == []
    assert [group.problem_id for group in sampling.select(groups)] == ["p0", "p4", "p5"]


def test_where_no_problem_is_left_those_without_a_signal_come_again_with_further_sample_indexes() -> None:
    sampling = rule(2, PROBLEMS[2:3])
    groups = [answer(GroupRequest(problem), 0, 0) for problem in PROBLEMS[:2]]
    group_requests = sampling.next_requests(groups, 1)
    assert group_requests == [GroupRequest(PROBLEMS[2]), GroupRequest(PROBLEMS[0], 2)]
    groups += [answer(group_requests[0], 0, 1), answer(group_requests[1], 1, 1)]
    group_requests = sampling.next_requests(groups, 2)
    assert group_requests == [GroupRequest(PROBLEMS[1], 2)], "the one that was drawn least"
    groups.append(answer(group_requests[0], 0, 0))
    assert sampling.next_requests(groups, 3) == [GroupRequest(PROBLEMS[0], 4)]


@pytest.mark.parametrize("seed", range(8))
def test_no_key_occurs_twice_and_every_round_asks_for_what_lacks_whatever_the_rewards(seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randint(1, 6)
    begin, spare = problems_of_step(PROBLEMS, 3, num, seed), spare_problems(PROBLEMS, 3, num, seed)
    assert sorted(p.problem_id for p in [*begin, *spare]) == sorted(p.problem_id for p in PROBLEMS)
    sampling = rule(num, spare, max_resamples=12)
    groups: list[Group] = []
    group_requests = [GroupRequest(problem) for problem in begin]
    for num_rounds in range(1, 20):
        assert len({request.problem.problem_id for request in group_requests}) == len(group_requests), (
            "a unit of work is known by its problem"
        )
        groups += [answer(request, 0.0, float(rng.random() < 0.2)) for request in group_requests]
        lacking = num - sum(group.has_signal for group in groups)
        group_requests = sampling.next_requests(groups, num_rounds)
        assert len(group_requests) == (lacking if num_rounds <= 12 else 0)
        if not group_requests:
            break
    keys = [(r.problem_id, r.sample_index) for group in groups for r in group.rollouts]
    assert len(set(keys)) == len(keys)
    kept = sampling.select(groups)
    assert len(kept) == num
    assert len({group.problem_id for group in kept}) == num


# ── in a phase ──────────────────────────────────────────────────────────────────────────────────────────────


PARITY = Scorers(lambda token_ids: float(sum(token_ids) % 5 == 0))
"""Gives some groups different rewards, and others not."""


class Watcher(DrafterTraining):
    """Writes down what a phase asks of the drafter's training."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self) -> None:
        self.events.append("begin")

    def publish_and_measure(self, rollouts: Sequence[Rollout], num_tokens: int, temperature: float) -> None:
        self.events.append(f"check {len(rollouts)}")

    def end(self, rollouts: Sequence[Rollout], seconds: float) -> None:
        self.events.append(f"end {len(rollouts)}")

    def abandon(self) -> None:
        self.events.append("abandon")


def sample(engine: RolloutEngine, step: int = 4, training: DrafterTraining = NO_TRAINING) -> PhaseResult:
    params = SamplingParams(temperature=1.0, max_tokens=16, stop_ids=(STOP,))
    begin, spare = problems_of_step(PROBLEMS, step, 4, 0), spare_problems(PROBLEMS, step, 4, 0)
    return make_phase(engine, local_work_queue(), PARITY).run(
        begin, 2, params, "rollout", step, IdleWork(training=training), rule(4, spare)
    )


def responses(groups: Sequence[Group]) -> list[tuple[str, int, tuple[int, ...], float]]:
    pairs = zip(*flatten(groups), strict=True)
    return [
        (rollout.problem_id, rollout.sample_index, rollout.token_ids, reward.value)
        for rollout, reward in pairs
    ]


def test_with_speculation_on_and_off_the_same_problems_are_drawn_again_and_answered_alike() -> None:
    plain = sample(make_engine(POLICY))
    assert plain.num_rounds > 2
    assert len(plain.groups) > len(plain.kept) == 4
    assert all(group.has_signal for group in plain.kept)
    assert any(group.request.first_sample for group in plain.groups), "some problem came twice"
    for strategy in (Strategy("learned", 3, 2, 6), Strategy("learned", 4, 1, 4)):
        speculated = sample(make_engine(POLICY, FixedTuner(strategy), max_batch_size=3))
        assert speculated.stats.accept_length is not None
        assert responses(speculated.groups) == responses(plain.groups)
        assert responses(speculated.kept) == responses(plain.kept)
    rollouts, rewards = plain.for_update
    assert len(rollouts) == len(rewards) == 8


def test_the_drafter_sees_all_rounds_as_one_step() -> None:
    watcher = Watcher()
    result = sample(make_engine(POLICY), training=watcher)
    num = len(result.rollouts)
    assert num == 2 * len(result.groups) > 8
    assert watcher.events == ["begin", f"check {num}", f"end {num}"]
    keys = [(rollout.problem_id, rollout.sample_index) for rollout in result.rollouts]
    assert keys == sorted(set(keys))


def test_a_stop_in_a_later_round_breaks_the_whole_step_off() -> None:
    engine = make_engine(POLICY)
    watcher = Watcher()
    phase = make_phase(engine, local_work_queue(), PARITY)
    begun = []
    begin = phase.queue.begin
    phase.queue.begin = lambda name, num: (begun.append(name), begin(name, num))  # type: ignore[method-assign]  # listens in
    phase.should_stop = lambda: len(begun) == 2
    params = SamplingParams(temperature=1.0, max_tokens=16, stop_ids=(STOP,))
    with pytest.raises(StopRequested, match="in step 5"):
        phase.run(PROBLEMS[:4], 2, params, "rollout", 4, IdleWork(training=watcher), rule(4, PROBLEMS[4:]))
    assert begun == ["rollout 4", "rollout 4, round 1"]
    assert watcher.events == ["begin", "abandon"]
    assert engine.is_idle


def test_idle_time_at_the_end_of_a_round_counts_and_so_does_the_training_in_it() -> None:
    """Replica 1 ends round 0 after 3 s of 10 and trains for 4 s; then replica 0 ends round 1 after 12 s of
    15."""

    def replica(
        start: float, last_token: float, end: float, train: float, num_migrated: int
    ) -> ReplicaReport:
        return ReplicaReport(
            start, last_token, end, EngineStats(), DrafterReport(2, 9, train), num_migrated=num_migrated
        )

    first = [replica(0, 10, 10.5, 0, 1), replica(0, 3, 10.5, 4, 0)]
    second = [replica(11, 12, 15.5, 1, 0), replica(11, 15, 15.5, 0, 2)]
    result = PhaseResult([], [], join_rounds([first, second]))
    assert result.seconds == pytest.approx(15.5)
    assert result.idle_seconds == pytest.approx(7 + 3)
    assert result.drafter_seconds == pytest.approx(4 + 1)
    assert [report.num_migrated for report in result.replicas] == [1, 2]
    assert join_rounds([first]) == first

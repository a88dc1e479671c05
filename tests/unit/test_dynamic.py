"""Dynamic sampling: what is drawn again, under which keys, and what the update takes. Pure functions, then a phase."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tlt.training.dynamic import Draw, DynamicSampling, Group
from tlt.training.problems import problems_of_step, spare_problems
from tlt.types import Problem, Reward, Rollout

PROBLEMS = [Problem(f"p{i}", (3, 4, 5 + i)) for i in range(12)]


def answer(draw: Draw, *values: float | None) -> Group:
    """A group of these rewards; None: could not be scored."""
    rewards = tuple(Reward(0.0 if v is None else v, False, "time-out" if v is None else "") for v in values)
    indexes = range(draw.first_sample, draw.first_sample + len(values))
    rollouts = tuple(Rollout(draw.problem.problem_id, i, draw.problem.prompt_ids, (1,), (0.0,), "stop", 0) for i in indexes)
    return Group(draw, rollouts, rewards)


def rule(num_groups: int, spare: Sequence[Problem], max_resamples: int = 9) -> DynamicSampling:
    return DynamicSampling(num_groups, 2, max_resamples, spare)


def test_a_group_has_a_signal_where_two_scores_differ() -> None:
    draw = Draw(PROBLEMS[0])
    assert answer(draw, 0.0, 1.0).has_signal
    assert not answer(draw, 1.0, 1.0).has_signal
    assert not answer(draw, 1.0, None).has_signal, "what could not be scored is no second score"


def test_groups_without_a_signal_are_replaced_by_the_next_spare_problems() -> None:
    sampling = rule(3, PROBLEMS[3:])
    groups = [answer(Draw(PROBLEMS[0]), 0, 1), answer(Draw(PROBLEMS[1]), 0, 0), answer(Draw(PROBLEMS[2]), 1, 1)]
    draws = sampling.next_draws(groups, 1)
    assert draws == [Draw(PROBLEMS[3]), Draw(PROBLEMS[4])]
    groups += [answer(draws[0], 1, 1), answer(draws[1], 0, 1)]
    assert sampling.next_draws(groups, 2) == [Draw(PROBLEMS[5])]
    groups.append(answer(Draw(PROBLEMS[5]), 0, 1))
    assert sampling.next_draws(groups, 3) == []
    assert [group.problem_id for group in sampling.select(groups)] == ["p0", "p4", "p5"]


def test_where_no_problem_is_left_those_without_a_signal_come_again_with_further_sample_indexes() -> None:
    sampling = rule(2, PROBLEMS[2:3])
    groups = [answer(Draw(problem), 0, 0) for problem in PROBLEMS[:2]]
    draws = sampling.next_draws(groups, 1)
    assert draws == [Draw(PROBLEMS[2]), Draw(PROBLEMS[0], 2)]
    groups += [answer(draws[0], 0, 1), answer(draws[1], 1, 1)]
    draws = sampling.next_draws(groups, 2)
    assert draws == [Draw(PROBLEMS[1], 2)], "the one that was drawn least"
    groups.append(answer(draws[0], 0, 0))
    assert sampling.next_draws(groups, 3) == [Draw(PROBLEMS[0], 4)]


def test_after_the_last_round_others_fill_up_each_problem_once() -> None:
    sampling = rule(3, (), max_resamples=1)
    groups = [answer(Draw(PROBLEMS[0]), 0, 0), answer(Draw(PROBLEMS[1]), 0, 0), answer(Draw(PROBLEMS[2]), 0, 1)]
    groups += [answer(Draw(PROBLEMS[0], 2), 1, 1), answer(Draw(PROBLEMS[1], 2), 0, 1)]
    assert sampling.next_draws(groups, 2) == []
    kept = sampling.select(groups)
    assert [(group.problem_id, group.draw.first_sample) for group in kept] == [("p2", 0), ("p1", 2), ("p0", 0)]


@pytest.mark.parametrize("seed", range(20))
def test_no_key_occurs_twice_and_every_round_asks_for_what_lacks_whatever_the_rewards(seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randint(1, 6)
    begin, spare = problems_of_step(PROBLEMS, 3, num, seed), spare_problems(PROBLEMS, 3, num, seed)
    assert sorted(p.problem_id for p in [*begin, *spare]) == sorted(p.problem_id for p in PROBLEMS)
    sampling = rule(num, spare, max_resamples=12)
    groups: list[Group] = []
    draws = [Draw(problem) for problem in begin]
    for num_rounds in range(1, 20):
        assert len({draw.problem.problem_id for draw in draws}) == len(draws), "a unit of work is known by its problem"
        groups += [answer(draw, 0.0, float(rng.random() < 0.2)) for draw in draws]
        lacking = num - sum(group.has_signal for group in groups)
        draws = sampling.next_draws(groups, num_rounds)
        assert len(draws) == (lacking if num_rounds <= 12 else 0)
        if not draws:
            break
    keys = [(r.problem_id, r.sample_index) for group in groups for r in group.rollouts]
    assert len(set(keys)) == len(keys)
    kept = sampling.select(groups)
    assert len(kept) == num
    assert len({group.problem_id for group in kept}) == num


def test_spare_problems_are_a_function_of_seed_and_step() -> None:
    assert spare_problems(PROBLEMS, 5, 4, 0) == spare_problems(PROBLEMS, 5, 4, 0)
    assert spare_problems(PROBLEMS, 5, 4, 0) != spare_problems(PROBLEMS, 5, 4, 1)
    assert spare_problems(PROBLEMS, 3, 4, 0) != spare_problems(PROBLEMS, 6, 4, 0)

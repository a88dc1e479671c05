"""Reward functions are given each group whole, wherever its responses finish and whatever was known before."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.lossless import helpers
from tests.unit.training.rollout.phase_parts import PATIENCE, POLICY, make_queues, running, wait_for
from tlt.base.strategy import Strategy
from tlt.base.types import Finished, Problem, Purpose, Request, Reward, Rollout, SamplingParams, id_of
from tlt.speculation.tuner.tuner import FixedTuner
from tlt.tasks.rewards.pool import RewardPool
from tlt.tasks.rewards.scoring import RewardSpec
from tlt.training.idle.protocol import DrafterTraining
from tlt.training.ranks.world import World
from tlt.training.report.timeline import Timeline
from tlt.training.rollout.dynamic import DynamicSampling
from tlt.training.rollout.phase import RolloutPhase
from tlt.training.rollout.protocol import Journal, Recalled, Sinks
from tlt.training.rollout.result import PhaseResult
from tlt.training.rollout.work import FinishedResponses
from tlt.training.rollout.work_queue import WorkQueue
from tlt.training.saved.checkpoint import Saved
from tlt.training.saved.journal import FileJournal
from tlt.training.saved.journal_file import read_records

FUNCTION = """
calls = []

def standing(completions, completion_ids, trainer_state, **columns):
    calls.append(completion_ids)
    lower = [sum(other < ids for other in completion_ids) for ids in completion_ids]
    return [100.0 * len(lower) + 10 * place + one for place, one in enumerate(lower)]
"""
NUM_SAMPLES = 3
PARAMS = SamplingParams(max_tokens=40, stop_ids=(0, 1, 2, 3), seed=4)
ALONE = World(0, 1, 0, torch.device("cpu"), HashStore(), None)


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the reward function was given."""
    (tmp_path / "group_rewards.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "group_rewards", raising=False)
    import group_rewards  # type: ignore[import-not-found]  # written above

    yield group_rewards.calls
    sys.modules.pop("group_rewards", None)


def standings(rollouts: Sequence[Rollout], num_samples: int = NUM_SAMPLES) -> list[float]:
    """The rewards, in canonical order: of the samples 0 to n - 1 of a problem, and of n to 2n - 1."""
    expected = []
    for start in range(0, len(rollouts), num_samples):
        ids = [rollout.token_ids for rollout in rollouts[start : start + num_samples]]
        expected += [
            100.0 * len(ids) + 10 * i + sum(other < one for other in ids) for i, one in enumerate(ids)
        ]
    return expected


def values(result: PhaseResult) -> list[float]:
    assert not [reward.error for reward in result.rewards if reward.error]
    return [reward.value for reward in result.rewards]


class Killed(Exception):
    pass


def run_phase(
    journal: Journal, num_workers: int = 0, kill_after: int | None = None, purpose: Purpose = "rollout"
) -> PhaseResult:
    """Runs a phase on one rank, with groups that are drawn in a second round, of old and of new problems.

    kill_after: finished responses after which this process "dies".
    """
    engine = helpers.make_engine(POLICY, FixedTuner(Strategy.OFF), max_batch_size=4)
    step, finished = engine.step, list[Finished]()

    def dying_step(captures: bool = False) -> list[Finished]:
        if kill_after is not None and len(finished) >= kill_after:
            raise Killed
        finished.extend(latest := [*step(captures)])
        return latest

    engine.step = dying_step  # type: ignore[method-assign, assignment]  # the fault
    problems = [Problem(f"p{i}", (3, 4, 5 + i)) for i in range(3)]
    sampling = DynamicSampling(5, NUM_SAMPLES, [Problem("s0", (3, 5, 5))], 1)
    with RewardPool(RewardSpec("data", ("group_rewards:standing",)), num_workers, 60) as scorers:
        sinks, queue = Sinks(scorers, str, journal), WorkQueue(HashStore(), 0, 1, 60.0)
        phase = RolloutPhase(ALONE, engine, queue, sinks, Timeline(0), lambda: False)
        return phase.run(problems, NUM_SAMPLES, PARAMS, purpose, 0, dynamic_sampling=sampling)


@pytest.mark.parametrize(("num_workers", "purpose"), [(0, "rollout"), (2, "rollout"), (0, "evaluation")])
def test_each_group_of_each_round_is_scored_whole(num_workers: int, purpose: Purpose) -> None:
    result = run_phase(Journal(), num_workers, purpose=purpose)
    assert (result.num_rounds, len(result.rollouts)) == (2, 4 * NUM_SAMPLES)
    assert values(result) == standings(result.rollouts)
    assert len({*values(result)}) > NUM_SAMPLES, "standings differ"


@pytest.mark.parametrize("kill_after", [1, 2, 5, 10])
def test_after_a_death_within_a_group_all_of_it_is_scored_as_it_would_have_been(
    kill_after: int, tmp_path: Path, calls: list[Any]
) -> None:
    def journal() -> FileJournal:
        return FileJournal(tmp_path / "j", ALONE, "run", Saved, "", Timeline(0), lambda line: None)

    whole = run_phase(Journal())
    with pytest.raises(Killed):
        run_phase(journal(), kill_after=kill_after)
    (path,) = (tmp_path / "j").rglob("replica-*")
    with path.open("rb") as file:
        kinds = [record.about["kind"] for _, record in read_records(file)]
    assert kinds.count("response") > kinds.count("reward"), "part of a group"
    again = run_phase(journal())
    assert again.recalled_tokens > 0
    assert values(again) == values(whole) == standings(again.rollouts)
    calls.clear()
    assert values(run_phase(journal())) == values(whole)
    assert not calls, "all rewards stand in the journal now"


class Ranks:
    """Collectives between the threads of two ranks; values are pickled, as between processes."""

    def __init__(self) -> None:
        self._barrier, self._values = threading.Barrier(2, timeout=PATIENCE), [None, None]

    def gather(self, world: World, value: Any) -> list[Any]:
        self._values[world.rank] = pickle.loads(pickle.dumps(value))
        self._barrier.wait()
        values = [*self._values]
        self._barrier.wait()
        return values

    def any_rank(self, world: World, is_true: bool) -> bool:
        return any(self.gather(world, is_true))


def test_a_group_whose_responses_end_on_two_ranks_is_scored_once_and_whole(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    """The first rank takes all the work and hands some over; only then does it go on."""
    monkeypatch.setattr("tlt.training.rollout.work_queue.HELP_SECONDS", 0.0)
    ranks, queues = Ranks(), make_queues(2)
    monkeypatch.setattr("tlt.training.rollout.phase.gather_objects", ranks.gather)
    monkeypatch.setattr("tlt.training.rollout.phase.any_rank", ranks.any_rank)
    offered, taken = threading.Event(), threading.Event()
    offer, take, take_late = queues[1].offer_help, queues[0].take, queues[1].take
    queues[1].offer_help = lambda: (offer(), offered.set())[0]  # type: ignore[method-assign]
    queues[0].take = lambda most: (take(most), taken.set())[0]  # type: ignore[method-assign]
    queues[1].take = lambda most: (wait_for(taken), take_late(most))[1]  # type: ignore[method-assign]

    def run(rank: int) -> PhaseResult:
        engine = helpers.make_engine(POLICY, FixedTuner(Strategy.OFF), max_batch_size=8)
        step = engine.step

        def step_when_help_is_offered(captures: bool = False) -> list[Finished]:
            wait_for(offered)
            return [*step(captures)]

        engine.step = step_when_help_is_offered  # type: ignore[method-assign, assignment]
        world = World(rank, 2, rank, torch.device("cpu"), HashStore(), None)
        with RewardPool(RewardSpec("data", ("group_rewards:standing",)), 0, 60) as scorers:
            sinks = Sinks(scorers, str)
            phase = RolloutPhase(world, engine, queues[rank], sinks, Timeline(rank), lambda: False)
            return phase.run([Problem("p0", (3, 4, 5))], 8, PARAMS, "rollout", 0)

    with running(lambda: run(0), lambda: run(1)) as results:
        pass
    one, other = results
    assert one.replicas[1].num_migrated > 0
    assert values(one) == values(other) == standings(one.rollouts, num_samples=8)
    assert len(calls) == 1


class Asked:
    """Scorers that note what they are asked, and give each response its sample index."""

    by_group = True

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.groups: list[Any] = []

    def submit(self, response_id: Any, *_: Any) -> None:
        self.open.append(response_id)

    def complete(self, group: Any) -> None:
        self.groups.append([*group])
        self.open = [one for one in self.open if one not in group]

    def withdraw(self, response_ids: Any) -> None:
        self.open = [one for one in self.open if one not in response_ids]

    def collect(self) -> dict[Any, Reward]:
        return {}

    def drain(self, patience: float) -> dict[Any, Reward]:
        return {}

    def abandon(self) -> None: ...


def test_of_recalled_groups_those_scored_whole_keep_their_rewards_and_others_go_to_one_rank() -> None:
    """a: all scored. b: all there, one without a score. c and d: begun before, ended on another rank."""
    requests = [[Request(name, i, (3, 4), PARAMS) for i in range(3)] for name in "abcd"]

    def answer(name: str, sample: int) -> Rollout:
        return Rollout(name, sample, (3, 4), (5, sample), (0.0, 0.0), "stop", 0)

    found = [
        answer(name, sample)
        for name, num in {"a": 3, "b": 3, "c": 1, "d": 2}.items()
        for sample in range(num)
    ]
    scored = {("a", i): Reward(1.0, True) for i in range(3)} | {("b", i): Reward(1.0, True) for i in range(2)}
    recalled, ranks, scorers = Recalled([], found, scored), [], [Asked(), Asked()]
    for rank in range(2):
        problems = [Problem(name, (3, 4)) for name in "abcd"]
        ended = FinishedResponses(problems, requests, Sinks(scorers[rank], str), DrafterTraining())
        ended.recall(recalled, rank, 2)
        ranks.append(ended)
    assert ranks[0].rewards == {("a", i): Reward(1.0, True) for i in range(3)}
    assert (scorers[0].groups, scorers[1].groups) == ([], [[("b", 0), ("b", 1), ("b", 2)]])
    for name, sample, rank in (("c", 2, 1), ("c", 1, 1), ("d", 2, 0)):
        ranks[rank].add(Finished(answer(name, sample)))
    divided = [dict(ended.divided) for ended in ranks]
    for rank, ended in enumerate(ranks):
        ended.settle(divided, rank)
    assert scorers[1].groups[1:] == [[("c", 0), ("c", 1), ("c", 2)], [("d", 0), ("d", 1), ("d", 2)]]
    assert not scorers[0].groups
    assert not any(one.open for one in scorers), "no rank waits for what another scores"
    assert sorted(id_of(rollout) for ended in ranks for rollout in ended.rollouts) == sorted(
        id_of(request) for group in requests for request in group
    )

"""The rollout phase and idle time: who trains when, how it ends, and what of it reaches those who still generate.

Replicas are threads that share a store; they wait for events of each other, never for a clock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.lossless.helpers import CONFIG, make_policy
from tlt.distributed.mailbox import Mailbox
from tlt.distributed.work_queue import Coordinator
from tlt.distributed.world import World
from tlt.drafter.buffer import TrajectoryBuffer
from tlt.drafter.learned import LearnedDrafter, LearnedSettings
from tlt.drafter.losses import PRESETS
from tlt.drafter.measure import Subject
from tlt.drafter.model import DraftModel, PackedDrafter, drafter_shape
from tlt.drafter.service import DrafterWatch, Ranks, RankState
from tlt.drafter.spot import SpotTrainer
from tlt.drafter.trainer import DrafterTrainer
from tlt.engine.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.models.attention import PackedCausal
from tlt.report.timeline import Timeline
from tlt.training.drafter_side import DrafterRefresh, DrafterSide, WatchedDrafter, connect_refresh
from tlt.training.phase import PhaseResult, ReplicaReport, RolloutPhase, StopRequested
from tlt.training.work import Work, worth_migrating
from tlt.tuning.tuner import Fixed
from tlt.types import DrafterReport, Finished, Problem, Request, Reward, Rollout, SamplingParams, Strategy

PARAMS = SamplingParams(temperature=0.7, max_tokens=24)
POLICY = make_policy()
TREES = Strategy("learned", 3, 2, 6)
PATIENCE = 60.0
"""Seconds after which a thread that was to act has not: only a failing test waits so long."""


class Scorers:
    """Stands in for the reward processes: nobody here cares."""

    def __init__(self) -> None:
        self.keys: list[tuple[str, int]] = []

    def submit(self, key: tuple[str, int], data: dict[str, Any], text: str) -> None:
        self.keys.append(key)

    def drain(self, patience: float) -> dict[tuple[str, int], Reward]:
        return {key: Reward(1.0, True) for key in self.keys}

    def abandon(self) -> None: ...


@dataclass
class OneTokenEngine:
    """Finishes a response per step; `before_step` may wait for others."""

    before_step: Callable[[], None] = lambda: None
    events: list[str] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    room: int = 1
    running: tuple[Any, ...] = ()
    num_waiting: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting

    def add(self, requests: Iterator[Request]) -> None:
        self.waiting += requests

    def step(self, captures: bool = False) -> list[Finished]:
        self.before_step()
        request = self.waiting.pop()
        self.events.append(f"generate {request.problem_id}")
        rollout = Rollout(request.problem_id, request.sample_index, request.prompt_ids, (1,), (0.0,), "stop", 0)
        return [Finished(rollout)]


class ScriptedSpot:
    """A spot trainer whose micro-steps are the test's."""

    def __init__(self, micro_step: Callable[[], None], events: list[str]) -> None:
        self.micro_step, self.events, self.keeps_captured = micro_step, events, True

    def add(self, rollout: Rollout, features_TE: torch.Tensor | None) -> None: ...

    def run(self, should_stop: Callable[[], bool], publish: Any = None) -> DrafterReport:
        num_micro_steps = 0
        while not should_stop():
            self.events.append("train")
            self.micro_step()
            num_micro_steps += 1
        return DrafterReport(num_micro_steps, preempted_at=time.perf_counter())


class Unwatched:
    """Lets every session of training through."""

    trains = True

    def run(self, session: Callable[[], DrafterReport]) -> DrafterReport:
        return session()


def make_phase(engine: Any, coordinator: Any) -> RolloutPhase:
    world, timeline = World(0, 1, 0, torch.device("cpu"), HashStore(), None), Timeline(0)
    scorers: Any = Scorers()
    return RolloutPhase(world, engine, coordinator, scorers, lambda ids: "", timeline, lambda: False)


def make_side(spot: Any, learned: Any = None, watch: Any = None, refresh: Any = None) -> WatchedDrafter:
    return WatchedDrafter(None, learned or SimpleNamespace(), watch or Unwatched(), spot, refresh, Timeline(0))


def make_watch(
    engine: RolloutEngine,
    learned: LearnedDrafter,
    spot: SpotTrainer,
    average: Callable[[Sequence[torch.Tensor], float], float] = lambda tensors, weight: 1.0,
    others: Sequence[int] = (),
) -> DrafterWatch:
    """`others`: drafter versions of other replicas' engines."""

    def gather(value: Any) -> list[Any]:
        return [value, *(RankState("", version, False) for version in others)] if isinstance(value, RankState) else [value]

    trainer = spot.trainer
    subject = Subject(trainer.model, learned.model, engine.model, lambda group, counts: 0)
    return DrafterWatch(subject, trainer, learned, lambda aside: None, Ranks(0, gather, average))


def make_problems(num: int) -> list[Problem]:
    return [Problem(f"p{index}", (3, 4, 5 + index)) for index in range(num)]


def generate(phase: RolloutPhase, problems: Sequence[Problem], spot: Any = None) -> tuple[list[Rollout], float, DrafterReport]:
    """The part of a phase in which a replica waits for nobody."""
    drafter = make_side(spot)
    drafter.begin("rollout")
    requests = [[Request(problem.problem_id, 0, problem.prompt_ids, PARAMS)] for problem in problems]
    phase.coordinator.begin("rollout", len(problems))
    return phase._generate(problems, Work(phase.coordinator, requests), drafter)


def make_coordinators(num: int) -> list[Coordinator]:
    store = HashStore()
    return [Coordinator(store, replica, num, timeout=PATIENCE) for replica in range(num)]


@contextmanager
def running(*targets: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs each in a thread of its own; leaving it waits for all and gives what they returned."""
    results: list[Any] = [None] * len(targets)

    def call(index: int, target: Callable[[], Any]) -> None:
        results[index] = target()

    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(targets)]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a replica hangs"


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE), "the other replica never came"


# ── who trains when ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_replica_that_runs_dry_trains_before_anything_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one engine step: after its last token come no further engine step and no wait."""
    events: list[str] = []
    monkeypatch.setattr("tlt.training.phase.time.sleep", lambda seconds: events.append("wait"))
    idle, busy = make_coordinators(2)
    busy.begin("rollout", 4)
    held = busy.take(1)
    trained = iter(range(3))
    spot = ScriptedSpot(lambda: busy.finish(held[0]) if next(trained) == 2 else None, events)
    rollouts, _, report = generate(make_phase(OneTokenEngine(events=events), idle), make_problems(4), spot)
    assert events == ["generate p1", "generate p2", "generate p3", "train", "train", "train"]
    assert [rollout.problem_id for rollout in rollouts] == ["p1", "p2", "p3"]
    assert report.num_micro_steps == 3, "and goes on until the last response of all"


def test_any_number_of_replicas_join_late_each_when_it_falls_idle() -> None:
    """Replica 0 generates until both others train; replica 2 falls idle only when replica 1 trains already."""
    coordinators = make_coordinators(3)
    trains = [threading.Event() for _ in range(3)]
    before_step = [
        lambda: (wait_for(trains[1]), wait_for(trains[2])),
        lambda: None,
        lambda: wait_for(trains[1]),
    ]
    took = threading.Barrier(3)

    def replica(index: int) -> Callable[[], tuple[list[Rollout], float, DrafterReport]]:
        started = iter([True])

        def before() -> None:
            if next(started, False):
                took.wait(PATIENCE)  # every replica holds a unit
                before_step[index]()

        events: list[str] = []
        phase = make_phase(OneTokenEngine(before, events), coordinators[index])
        return lambda: generate(phase, make_problems(3), ScriptedSpot(trains[index].set, events))

    with running(*(replica(index) for index in range(3))) as results:
        pass
    assert sorted(rollout.problem_id for rollouts, _, _ in results for rollout in rollouts) == ["p0", "p1", "p2"]
    assert all(report.num_micro_steps >= 1 for _, _, report in results[1:])
    assert trains[1].is_set()
    assert trains[2].is_set()


class LateWork:
    """A queue that holds one unit, and another one once `appear` was called."""

    def __init__(self) -> None:
        self.units, self.unfinished = [0], 2

    def begin(self, name: str, num_units: int) -> None: ...
    def heartbeat(self) -> None: ...
    def offer_help(self) -> None: ...
    def num_offers(self) -> int:
        return 0

    def appear(self) -> None:
        self.units.append(1)

    def take(self, room: int) -> list[int]:
        return [self.units.pop()] if self.units else []

    def has_work(self) -> bool:
        return bool(self.units)

    def finish(self, unit: int) -> None:
        self.unfinished -= 1

    def all_done(self) -> bool:
        return self.unfinished == 0


def test_training_gives_way_to_new_work_and_goes_on_after_it() -> None:
    queue, events = LateWork(), []
    queue.unfinished = 3  # the third is another replica's
    script = iter([lambda: None, queue.appear, lambda: None, lambda: queue.finish(2)])

    def micro_step() -> None:
        next(script)()

    spot = ScriptedSpot(micro_step, events)
    _, _, report = generate(make_phase(OneTokenEngine(events=events), queue), make_problems(2), spot)
    assert events == ["generate p0", "train", "train", "generate p1", "train", "train"]
    assert report.num_micro_steps == 4


@pytest.mark.parametrize("speculates", [True, False])
def test_a_replica_that_runs_dry_takes_over_running_responses(speculates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has all the work and the other none. Everything is finished once, with the tokens that one alone would give."""
    monkeypatch.setattr("tlt.distributed.work_queue.HELP_SECONDS", 0.0)
    problems = make_problems(4)
    alone, _ = make_engine(strategy=Strategy.OFF)
    requests = [[Request(problem.problem_id, 0, problem.prompt_ids, PARAMS)] for problem in problems]
    expected = {rollout.problem_id: rollout.token_ids for rollout in alone.generate(group[0] for group in requests)}
    coordinators, works, offered = make_coordinators(2), [], threading.Event()
    offer = coordinators[1].offer_help
    coordinators[1].offer_help = lambda: (offer(), offered.set())[0]

    def replica(index: int) -> Callable[[], tuple[list[Rollout], float, DrafterReport]]:
        engine, _ = make_engine(strategy=TREES if speculates else Strategy.OFF)
        step = engine.step

        def step_when_help_is_offered(captures: bool = False) -> list[Finished]:
            wait_for(offered)
            return step(captures)

        engine.step = step_when_help_is_offered
        phase = make_phase(engine, coordinators[index])
        coordinators[index].begin("rollout", len(problems))
        works.append(Work(coordinators[index], requests))
        while index == 0 and engine.room:  # a full engine never sees that the queue is empty
            engine.add(works[0].take(1))
        take = works[index].take

        def take_back_only_when_idle(room: int) -> list[Request]:
            taken = take(room)
            assert index == 1 or engine.is_idle or not taken
            return taken

        works[index].take = take_back_only_when_idle
        return lambda: phase._generate(problems, works[index], DrafterSide())

    with running(replica(0), replica(1)) as results:
        pass
    found = [rollout for rollouts, _, _ in results for rollout in rollouts]
    assert len(found) == len(problems)
    assert {rollout.problem_id: rollout.token_ids for rollout in found} == expected
    assert works[1].num_received > 0
    assert all(coordinator.all_done() for coordinator in coordinators)
    assert not any(work.unit_of for work in works)


def test_half_of_the_responses_migrate_but_none_that_is_nearly_done() -> None:
    assert worth_migrating([(10, 90)], 1) == []
    assert worth_migrating([(10, 90), (20, 80)], 1) == [0], "the one that is cheaper to read again"
    assert worth_migrating([(60, 40), (20, 80)], 1) == [1]
    assert worth_migrating([(60, 40), (70, 30)], 1) == []
    assert worth_migrating([(50, 50), (10, 90), (40, 60), (20, 80), (30, 70)], 1) == [1, 4], "short and long ones"
    assert worth_migrating([(60, 40), (10, 90), (70, 30), (20, 80), (80, 20), (90, 10)], 1) == [1, 3]
    assert [len(worth_migrating([(10, 90)] * 12, num_offers)) for num_offers in (1, 2, 3, 20)] == [6, 4, 3, 1], "equal parts"


def test_what_waits_for_a_slot_is_handed_over_first() -> None:
    """Three of eight run; of what waits as much goes as makes both even, and comes from its end."""
    engine = RolloutEngine(CONFIG, dtype=torch.float64, max_batch_size=3)
    engine.load_policy(dict(POLICY.named_parameters()))
    group = [Request("p0", i, (3, 4, 5), PARAMS) for i in range(8)]
    busy, idle = make_coordinators(2)
    works = []
    for coordinator in (busy, idle):
        coordinator.begin("rollout", 1)
        works.append(Work(coordinator, [group]))
    engine.add(works[0].take(1))
    engine.step()
    idle.offer_help()
    works[0].share(engine, busy.num_offers())
    taken = works[1].take(1)
    assert [request.sample_index for request in taken] == [7, 6, 5, 4]
    assert engine.num_waiting == 1
    assert len(engine.running) == 3


def test_a_replica_at_the_limit_of_passes_waits_and_its_waiting_is_not_counted_as_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another replica finishes the last response when this one has waited three times."""
    engine, _ = make_engine()
    trainer = DrafterTrainer(make_model(2), engine.model, PRESETS["hass"])
    spot = SpotTrainer(trainer, TrajectoryBuffer(10**6), 48, max_passes=2.0)
    spot.add(Rollout("before", 0, (3, 4), (5,) * 60, (0.0,) * 60, "stop", 0), torch.randn(61, CONFIG.hidden_size))
    idle, busy = make_coordinators(2)
    busy.begin("rollout", 2)
    held, waits, sleep = busy.take(1), [], time.sleep

    def wait(seconds: float) -> None:
        waits.append(trainer.num_tokens)
        sleep(0.02)
        if len(waits) == 3:
            busy.finish(held[0])

    monkeypatch.setattr("tlt.training.phase.time.sleep", wait)
    phase = make_phase(OneTokenEngine(), idle)
    phase.should_stop = lambda: trainer.num_tokens > 10**4
    start = time.perf_counter()
    _, _, report = generate(phase, make_problems(2), spot)
    assert waits == [report.num_tokens] * 3
    assert 0 < report.num_tokens <= 120
    assert report.is_limited
    assert report.seconds < time.perf_counter() - start - 3 * 0.02


def test_idle_time_before_new_work_counts_and_so_does_the_training_in_it() -> None:
    """4 s without work of which 3 trained, work, and 2 s at the end, where the trainer overran by one."""
    replica = ReplicaReport(0.0, 10.0, 13.0, EngineStats(), DrafterReport(9, 9, 6.0), gap_seconds=4.0, gap_training=3.0)
    other = ReplicaReport(0.0, 12.0, 13.0, EngineStats(), DrafterReport())
    result = PhaseResult([], [], [replica, other])
    assert result.idle_seconds == pytest.approx(4.0 + 2.0)
    assert result.drafter_seconds == pytest.approx(3.0 + 2.0)


def test_preemption_is_measured_from_the_last_response_of_all_where_a_trainer_was_at_work() -> None:
    def replica(last_token: float, preempted_at: float | None) -> ReplicaReport:
        return ReplicaReport(0.0, last_token, 11.0, EngineStats(), DrafterReport(1, 9, 2.0, preempted_at=preempted_at))

    replicas = [replica(10.0, None), replica(4.0, 10.03), replica(5.0, 10.001), replica(9.0, 8.5)]
    result = PhaseResult([], [], replicas)
    assert result.preemption_seconds == pytest.approx((0.03, 0.001)), "the last one had gone back to generating at 8.5"
    assert result.idle_seconds == pytest.approx(0 + 6 + 5 + 1)


# ── a drafter in training reaches engines that generate ──────────────────────────────────────────────────────────────


def make_model(seed: int) -> DraftModel:
    return DraftModel(drafter_shape(CONFIG)).double().initialize(seed)


def make_engine(seed: int = 2, strategy: Strategy = TREES) -> tuple[RolloutEngine, LearnedDrafter]:
    engine = RolloutEngine(CONFIG, dtype=torch.float64, max_batch_size=4, tuner=Fixed(strategy))
    engine.load_policy(dict(POLICY.named_parameters()))
    model = make_model(seed)
    packed = PackedDrafter(model.config, torch.float64)
    packed.load(model.state_dict(), 7)
    learned = LearnedDrafter(packed, engine.model, 4, LearnedSettings(tau=0.7, calibrate=False))
    engine.load_drafter(learned)
    return engine, learned


def predicts_like(learned: LearnedDrafter, model: DraftModel) -> bool:
    inputs, attend = torch.randn(2, 5, CONFIG.hidden_size, dtype=torch.float64), PackedCausal(CONFIG, [5])
    with torch.no_grad():
        found, wanted = (m.forward(*inputs, attend.positions(), attend) for m in (learned.model, model))
    return torch.allclose(found, wanted, rtol=0, atol=1e-9)


def make_requests() -> list[Request]:
    return [Request(f"p{index}", 0, (3, 4, 5 + index), replace(PARAMS, max_tokens=20 + 8 * index)) for index in range(4)]


def test_a_drafter_loaded_between_two_engine_steps_drafts_as_if_it_had_always_been_there() -> None:
    """Its own cache is the old weights' work: had it stayed, the drafts would be others."""
    requests = make_requests()
    plain, _ = make_engine(strategy=Strategy.OFF)
    expected = {rollout.problem_id: rollout.token_ids for rollout in plain.generate(requests)}
    always, _ = make_engine(seed=3)
    switched, learned = make_engine(seed=2)
    found: dict[str, tuple[int, ...]] = {}
    drafts: list[dict[tuple[int, ...], list[int]]] = []
    for engine in (always, switched):
        engine.add(requests)
        trees: dict[tuple[int, ...], list[int]] = {}
        propose = engine.drafter.propose

        def watched(context: Any, *args: Any, propose: Any = propose, trees: dict[Any, Any] = trees) -> Any:
            proposal = propose(context, *args)
            rows = zip(context.tokens, proposal.tree.tokens_BN, strict=True)
            trees |= {tuple(row): drafted.tolist() for row, drafted in rows}
            return proposal

        engine.drafter.propose = watched
        for step in range(10**6):
            if engine.is_idle:
                break
            found |= {finished.rollout.problem_id: finished.rollout.token_ids for finished in engine.step()}
            if engine is switched and step == 4:
                learned.load(make_model(3).state_dict(), 8)
                trees.clear()
        assert found == expected, "tokens do not depend on the drafter"
        drafts.append(trees)
    common = drafts[0].keys() & drafts[1].keys()
    assert len(common) > 10
    assert all(drafts[0][tokens] == drafts[1][tokens] for tokens in common)


def run_with_refresh(
    is_published: bool, rollout: str = "rollout 0", version: int = 7, fault: float = 0.0
) -> tuple[PhaseResult, LearnedDrafter]:
    """A replica that generates alone, and an idle one that may have published its drafter, with a fault added to a weight."""
    engine, learned = make_engine()
    store = HashStore()
    refresh = DrafterRefresh(Mailbox(store), learned, seconds=1e-9)
    spot = SpotTrainer(DrafterTrainer(make_model(2), engine.model, PRESETS["hass"]), TrajectoryBuffer(10**6), 48)
    if is_published:
        _, other = make_engine()
        other.model.version = version
        sender = DrafterRefresh(Mailbox(store), other, seconds=1e-9)
        sender.begin(rollout)
        model = make_model(3)
        with torch.no_grad():
            model.fc.weight[2, 1] += fault
        sender.publish(model)
    (coordinator,) = make_coordinators(1)
    drafter = make_side(spot, learned, make_watch(engine, learned, spot), refresh)
    problems = make_problems(6)
    return make_phase(engine, coordinator).run(problems, 2, PARAMS, "rollout", 0, drafter), learned


def test_a_published_drafter_is_taken_up_once_and_changes_no_token() -> None:
    plain, untouched = run_with_refresh(is_published=False)
    refreshed, learned = run_with_refresh(is_published=True)
    assert [report.num_refreshes for report in plain.replicas] == [0]
    assert [report.num_refreshes for report in refreshed.replicas] == [1]
    assert [rollout.token_ids for rollout in refreshed.rollouts] == [rollout.token_ids for rollout in plain.rollouts]
    assert (untouched.version, learned.version) == (8, 9), "the average comes after what was taken up"
    assert predicts_like(learned, make_model(2))


@pytest.mark.parametrize("rollout", ["rollout 1", "rollout 00", "rollout", "evaluation 0"])
def test_a_drafter_published_in_another_rollout_is_not_taken_up(rollout: str) -> None:
    """Though the engine had the same version then: that rollout's update was undone."""
    result, learned = run_with_refresh(is_published=True, rollout=rollout)
    assert result.replicas[0].num_refreshes == 0
    assert learned.version == 8, "the average alone"


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_drafter_that_is_not_finite_is_not_sent(fault: float) -> None:
    result, learned = run_with_refresh(is_published=True, fault=fault)
    assert result.replicas[0].num_refreshes == 0
    assert learned.version == 8, "the average alone"


def test_runs_side_by_side_have_mailboxes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    monkeypatch.setattr("tlt.training.drafter_side.connect_mailbox", lambda store, name: names.append(name))
    for folder in ("a", "b"):
        settings = SimpleNamespace(refresh_during_rollout=True, refresh_seconds=1.0)
        world: Any = SimpleNamespace(store=None, group=object())
        assert connect_refresh(settings, world, Path("runs") / folder, learned=None) is not None
    assert len(set(names)) == 2


def test_after_the_rollout_all_replicas_have_the_average_under_one_version_above_all_others() -> None:
    """This replica took up a drafter twice (9), another three times (10), a third trained."""
    engine, learned = make_engine()
    spot = SpotTrainer(DrafterTrainer(make_model(2), engine.model, PRESETS["hass"]), TrajectoryBuffer(10**6), 48)
    (coordinator,) = make_coordinators(1)
    average = make_model(5)

    def average_weighted(tensors: Sequence[torch.Tensor], weight: float) -> float:
        assert weight == 0, "this replica did not train"
        spot.trainer.model.load_state_dict(average.state_dict())
        return 9.0

    drafter = make_side(spot, learned, make_watch(engine, learned, spot, average_weighted, others=(10, 7)))
    learned.load(make_model(4).state_dict(), 9)
    result = make_phase(engine, coordinator).run(make_problems(2), 2, PARAMS, "rollout", 0, drafter)
    assert result.check is not None
    assert (learned.version, result.check.version) == (11, 11)
    assert predicts_like(learned, average)
    assert len(spot.buffer) == 4, "and the longest responses for the next step"
    assert spot.step_seconds == result.seconds


# ── what a step leaves to train on ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("keeps_captured", [True, False])
def test_a_step_that_is_broken_off_leaves_what_it_started_with_to_train_on(keeps_captured: bool) -> None:
    engine, learned = make_engine()
    trainer = DrafterTrainer(make_model(2), engine.model, PRESETS["hass"])
    carried = [Rollout("before", 0, (3, 4), (5, 6, 7), (0.0,) * 3, "stop", 0)]
    spot = SpotTrainer(trainer, TrajectoryBuffer(10**6), 48, keeps_captured=keeps_captured)
    spot.end_step(carried, 1.0)
    started = [t.token_ids for t in spot.buffer.trajectories]
    (coordinator,) = make_coordinators(1)
    phase = make_phase(engine, coordinator)
    phase.should_stop = lambda: len(spot.buffer) > 3
    with pytest.raises(StopRequested):
        phase.run(make_problems(6), 2, PARAMS, "rollout", 0, make_side(spot, learned, make_watch(engine, learned, spot)))
    assert [t.token_ids for t in spot.buffer.trajectories] == started == [(3, 4, 5, 6, 7)]
    assert spot.state_dict()["trajectories"] == [((3, 4, 5, 6, 7), 2)]


def test_what_a_broken_off_step_pushed_out_of_the_buffer_comes_back() -> None:
    def rollout(name: str, length: int) -> Rollout:
        return Rollout(name, 0, (3, 4), (5,) * length, (0.0,) * length, "stop", 0)

    buffer = TrajectoryBuffer(8 * 20)
    buffer.carry_over([rollout("before", 10)], 1)
    buffer.add(rollout("new", 17))
    assert [len(t.token_ids) for t in buffer.trajectories] == [19]
    buffer.abandon()
    assert [len(t.token_ids) for t in buffer.trajectories] == [12]


def test_after_a_phase_the_caches_give_their_memory_to_the_policy_update() -> None:
    engine, learned = make_engine()
    (coordinator,) = make_coordinators(1)
    make_phase(engine, coordinator).run(make_problems(6), 2, PARAMS, "rollout", 0)
    assert engine.stats.num_tokens > 0
    caches = (engine.cache.storage_ISKLD, learned.pairs.cache.storage_ISKLD, learned.pairs.history.ring_SCF)
    assert [cache.nbytes for cache in caches] == [0, 0, 0]


def test_features_are_read_out_only_where_they_are_trained_on() -> None:
    reads = []
    for keeps_captured in (True, False):
        engine, learned = make_engine()
        read = learned.pairs.history.read
        num_reads: list[int] = []
        learned.pairs.history.read = lambda s, f, t, read=read, n=num_reads: (f == [0] and n.append(1)) or read(s, f, t)
        trainer = DrafterTrainer(make_model(2), engine.model, PRESETS["hass"])
        spot = SpotTrainer(trainer, TrajectoryBuffer(10**6), 48, keeps_captured=keeps_captured)
        (coordinator,) = make_coordinators(1)
        drafter = make_side(spot, learned, make_watch(engine, learned, spot))
        finished: list[str] = []
        add = spot.add
        spot.add = lambda r, f, add=add, done=finished: done.append(r.problem_id) or add(r, f)
        make_phase(engine, coordinator).run(make_problems(2), 1, PARAMS, "rollout", 0, drafter)
        assert sorted(finished) == ["p0", "p1"]
        reads.append(len(num_reads))
    assert reads[0] >= reads[1] + 2


def test_a_response_that_is_handed_over_is_known_by_its_sample_index_wherever_that_begins() -> None:
    requests = [Request("p", index, (3, 4), PARAMS) for index in (4, 5)]
    work = Work(make_coordinators(1)[0], [requests])
    running = replace(requests[1], token_ids=(7, 8), logprobs=(-0.25, -1.5))
    assert work._unpack(work._pack(running)) == running

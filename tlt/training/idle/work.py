"""The work of an idle rank in a phase, by the plan of choice.py.

idle ─▶ generate ahead ─▶ train the drafter ─▶ nothing to do     at any time: real work, or the end
          └─── rest for a moment, now and then ───┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tlt.base.records import AheadReport, DrafterReport, IdleStretch, IdleUse
from tlt.base.spans import SpanName
from tlt.training.idle.choice import IdleChoice, IdlePlan
from tlt.training.idle.protocol import NO_AHEAD, NO_TRAINING, Ahead, DrafterTraining
from tlt.training.ranks.world import World, gather_objects
from tlt.training.report.timeline import Timeline

_SPANS = {IdleUse.AHEAD: SpanName.AHEAD, IdleUse.REST: SpanName.WAIT}
"""The trainer records its own spans, one per micro-step."""


@dataclass(frozen=True)
class IdleWork:
    ahead: Ahead = NO_AHEAD
    training: DrafterTraining = NO_TRAINING
    plan: IdlePlan = field(default_factory=IdlePlan)


def build_idle_choice(
    world: World, machine: str, ahead: bool, trains: bool, compares: bool = False
) -> IdleChoice:
    """A collective."""
    machines = gather_objects(world, machine)
    uses = [use for use, is_there in {IdleUse.AHEAD: ahead, IdleUse.TRAIN: trains}.items() if is_there]
    return IdleChoice(uses, compares, has_neighbours=len(set(machines)) < len(machines))


class IdleTime:
    def __init__(
        self,
        work: IdleWork,
        has_better_to_do: Callable[[], bool],
        rest: Callable[[], None],
        timeline: Timeline,
    ) -> None:
        self.ahead, self.plan, self.training = work.ahead, work.plan, work.training
        self.has_better_to_do, self.rest, self.timeline = has_better_to_do, rest, timeline
        self.drafter_report, self._ahead_report = DrafterReport(), AheadReport()
        self.stretches: list[IdleStretch] = []
        self.use: IdleUse | None = None  # None: the rank is not idle
        self._since = self._seconds = 0.0

    @property
    def ahead_report(self) -> AheadReport:
        return replace(
            self._ahead_report, seconds=sum(s.end - s.start for s in self.stretches if s.use is IdleUse.AHEAD)
        )

    def spend(self) -> None:
        """Does the plan's first use that has something to do, until there is real work; else rests."""
        self._turn_to(IdleUse.REST)
        if not (self._is_time_to_rest() or any(self._do(use) for use in self.plan.order)):
            self.rest()
        elif self._is_time_to_rest():
            self._rest()

    def leave(self) -> None:
        self._turn_to(None)

    def _do(self, use: IdleUse) -> bool:
        return self._generate_ahead() if use is IdleUse.AHEAD else self._train()

    def _generate_ahead(self) -> bool:
        def stops() -> bool:
            if self._is_time_to_rest():  # without ending the session, so its responses stay in the engine
                self._turn_to(IdleUse.REST)
                self._rest()
                self._turn_to(IdleUse.AHEAD)
            return self.has_better_to_do()

        self._turn_to(IdleUse.AHEAD)
        report = self.ahead.run(stops)
        self.use = IdleUse.AHEAD if report.num_steps else IdleUse.REST
        self._turn_to(IdleUse.REST)
        self._ahead_report = self._ahead_report.plus(report)
        return report.num_steps > 0

    def _train(self) -> bool:
        self._turn_to(IdleUse.TRAIN)
        report = self.training.train(lambda: self._is_time_to_rest() or self.has_better_to_do())
        self.use = IdleUse.TRAIN if report.num_micro_steps else IdleUse.REST
        self._turn_to(IdleUse.REST)
        if report.num_micro_steps:
            self.drafter_report = self.drafter_report.plus(report)
        return report.num_micro_steps > 0

    def _is_time_to_rest(self) -> bool:
        return self.plan.rests(self._seconds + self.timeline.clock() - self._since)

    def _rest(self) -> None:
        while self._is_time_to_rest() and not self.has_better_to_do():
            self.rest()

    def _turn_to(self, use: IdleUse | None) -> None:
        now, last = self.timeline.clock(), self.use
        if last is not None and now > self._since:
            self._seconds += now - self._since
            if last in _SPANS:
                self.timeline.record(_SPANS[last], self._since, now)
            start, before = self._since, self.stretches[-1:]
            if before and before[0].use is last and before[0].end == start:
                start = self.stretches.pop().start
            self.stretches.append(IdleStretch(last, start, now))
        self.use, self._since = use, now

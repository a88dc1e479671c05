"""Charts of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlt.apps.page.gather import RunRecords
from tlt.apps.page.series import STEPS
from tlt.apps.page.shapes import Areas, Chart, Line, Stretches
from tlt.apps.page.time_use import USE_NAMES, StepTime, read_step

MAX_READ = 60


@dataclass(frozen=True)
class ChosenStep:
    run: RunRecords
    why: str
    time: StepTime

    @property
    def label(self) -> str:
        return f"step {self.time.step} ({self.why}, {self.time.seconds:.3g} s)"


@dataclass(frozen=True)
class RunTime:
    run: RunRecords
    read: list[StepTime]
    chosen: list[ChosenStep]

    @property
    def rank_note(self) -> str:
        ranks = max((len(time.pieces) for time in self.read), default=0)
        return f"{len(self.read)} of {len(self.run.steps)} steps, {ranks} rank(s)"


def read_times(run: RunRecords) -> RunTime:
    records, count = run.steps, len(run.steps)
    if not records:
        return RunTime(run, [], [])
    slowest_first = sorted(records, key=lambda record: -record.step_seconds)
    reasons = {
        slowest_first[0].step: "slowest",
        slowest_first[count // 2].step: "median",
        records[-1].step: "last",
        records[0].step: "first",
    }
    if slowest_first[0] in (records[-1], records[0]):
        reasons[slowest_first[0].step] += ", slowest"
    spread = {records[i].step for i in np.linspace(0, count - 1, min(count, MAX_READ)).astype(int)}
    found = {
        record.step: time
        for record in records
        if record.step in spread | reasons.keys() and (time := read_step(run, record)) is not None
    }
    chosen = [ChosenStep(run, why, found[step]) for step, why in reasons.items() if step in found]
    return RunTime(run, [time for step, time in found.items() if step in spread], chosen)


def use_chart(time: RunTime) -> Chart | None:
    if not time.read:
        return None
    by_use = [step.seconds_by_use() for step in time.read]
    layers = {use: np.array([seconds[use] for seconds in by_use]) for use in USE_NAMES}
    layers = {use: seconds for use, seconds in layers.items() if seconds.any()}
    x = np.array([step.step for step in time.read], dtype=np.float64)
    see = (
        f"Where each step's seconds went, the mean over ranks ({time.rank_note}): the height is the "
        "step's length, and waiting is what speculation and idle work shorten."
    )
    return Chart("time", "Every second of every step", see, STEPS, "seconds", [Areas(x, layers)], True)


def shares_of_time(time: RunTime) -> dict[str, float]:
    sums = dict.fromkeys(USE_NAMES, 0.0)
    for step in time.read:
        for use, seconds in step.seconds_by_use().items():
            sums[use] += seconds
    total = sum(sums.values())
    return {use: seconds / total for use, seconds in sums.items() if seconds} if total else {}


def rank_chart(chosen: ChosenStep) -> Chart:
    rows = [f"rank {rank}" for rank in chosen.time.pieces]
    stretches = [
        (f"rank {rank}", piece.use, piece.start, piece.end)
        for rank in chosen.time.pieces
        for piece in chosen.time.columns(rank)
    ]
    see = "What each rank did: one without a response trains the drafter, generates ahead or waits."
    return Chart(
        "ranks",
        chosen.label,
        see,
        "seconds since the step began",
        "",
        [Stretches(rows, stretches)],
        x_end=chosen.time.seconds,
    )


def load_charts(chosen: ChosenStep) -> Sequence[Chart]:
    if not any(chosen.time.engine.values()):
        return []
    x, running, tokens = chosen.time.curves()
    time, label = "seconds since the step began", "all ranks"
    return [
        Chart(
            "running",
            "Running responses",
            "Responses in the running batches: the long tail is where few are left.",
            time,
            "responses",
            [Line(label, x, running, 0)],
            x_end=chosen.time.seconds,
            is_count=True,
        ),
        Chart(
            "rate",
            "Tokens per second",
            "Tokens committed per second: where the batch is small, longer drafts keep it up.",
            time,
            "tokens per second",
            [Line(label, x, tokens, 1)],
            x_end=chosen.time.seconds,
        ),
    ]

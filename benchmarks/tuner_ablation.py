"""What each part of the tuner brings, on worlds of measured costs and measured acceptance, with counted time.

    python -m benchmarks.tuner_ablation record countdown --world WORLD.json           # minutes, on a quiet core
    python -m benchmarks.tuner_ablation play WORLD.json … --out RESULT --seeds 32     # writes RESULT.json, RESULT.md

    record   one token is committed per step, and every drafter drafts at every position: how many of its tokens
             would be accepted there. Seconds, of this thread, of steps without drafts and with short and long ones
    play     a tuner chooses, the world answers ─▶ true seconds, counted  (and the tuner's own)
                                                └▶ with noise, outliers and cold first steps ─▶ the tuner

A world's sequences are drawn anew for each seed. The best fixed strategy is known in hindsight, so thousands of
steps compare to a percent of it.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import carry_out, command_of, make_parser
from benchmarks.report import environment, markdown, table, write_report
from benchmarks.subject import Subject
from tlt.base.config.load import load_config
from tlt.base.io.files import dumps
from tlt.base.speculation import Adaptive
from tlt.base.strategy import Strategy
from tlt.base.types import UserError, Verdict, id_of
from tlt.engine.own import engine as engine_module
from tlt.engine.own.engine import RolloutEngine
from tlt.speculation.law.verify import verify
from tlt.speculation.tuner import acceptance, cost_model
from tlt.speculation.tuner.protocol import BatchState, StepOutcome, StrategyTuner
from tlt.speculation.tuner.tuner import Fixed, default_arms, make_tuner

SIZES = {1: 16, 4: 48, 16: 96, 64: 256}
"""Responses by batch size."""
NOISE, DISTURBED, FACTORS = 0.08, 0.02, (1.5, 6.0)
"""Deviation of a step's log seconds; share of steps that other work disturbs, and by which factors."""
COLD, BEGIN = 0.003, 0.05
"""Seconds that an arm's first step at a batch size takes besides, and an engine's first step."""
KINDS = ("learned", "ngram", "hybrid")
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no trials": {"EXPLORE": 0.0},
    "less optimism (0.5)": {"OPTIMISM": 0.5},
    "decides every step": {"MOST_HELD": 1},
    "evidence never fades": {"_MEMORY": 1e9, "_MEMORY_STEPS": 1e9},
}


# ── record ──────────────────────────────────────────────────────────────────────────────────────────────────


class _ThreadClock:
    """Seconds of this thread: what runs beside it hardly counts."""

    perf_counter = staticmethod(time.thread_time)


def run(subject: Subject, arm: Strategy, size: int, num: int, max_steps: int) -> tuple[list[float], Any]:
    """Returns the seconds of full steps, and (accepted, drafted) by sequence and position."""
    engine = subject.engine("off" if arm.is_off else str(arm), size)
    assert isinstance(engine, RolloutEngine)
    seconds, traces, whole = list[float](), dict[Any, dict[int, tuple[int, int]]](), list[Verdict]()

    def first_token(*arguments: Any) -> list[Verdict]:
        whole[:] = verify(*arguments)
        return [
            v._replace(tokens=v.tokens[:1], num_accepted=0, path=v.path[:1], logprobs=v.logprobs[:1])
            for v in whole
        ]

    observe, record = engine.drafter.observe, engine._record

    def noted(start: float, batch: BatchState, *others: Any) -> None:
        record(start, batch, *others)
        if batch.num_running == size and not batch.num_admitted:
            seconds.append(time.thread_time() - start)
        for sequence, verdict in zip(engine.running, whole, strict=False):
            place = traces.setdefault(id_of(sequence.request), {})
            place[sequence.num_tokens - 1] = verdict.num_accepted, verdict.num_drafted

    setattr(engine, "verify", first_token)  # noqa: B010  # mypy assigns no method
    setattr(engine, "_record", noted)  # noqa: B010
    setattr(engine.drafter, "observe", lambda proposal, _: observe(proposal, whole))  # noqa: B010
    engine.add(subject.requests(0, num))
    for _ in itertools.takewhile(lambda _: not engine.is_idle, range(max_steps)):
        engine.step()
    return seconds, traces


def record(config: Path, overrides: Sequence[str], size: int, max_steps: int) -> dict[str, Any]:
    subject = Subject(load_config(config, overrides))
    kinds = KINDS if subject.drafter else ("ngram",)
    setattr(engine_module, "time", _ThreadClock)  # noqa: B010
    deep = {kind: run(subject, Strategy(kind, 15, 1, 15), size, 4 * size, max_steps)[1] for kind in kinds}
    costs: dict[str, dict[int, float]] = {"off": {}, "learned:1x1x1": {}, "learned:15x1x15": {}}
    for arm, batch in itertools.product(list(costs)[: 3 if subject.drafter else 1], SIZES):
        seconds, _ = run(subject, Strategy.parse(arm), batch, batch, 24)
        costs[arm][batch] = float(np.quantile(seconds[2:], 0.2))
    names = sorted(deep[kinds[0]])
    traces = {kind: [_row(deep[kind][name]) for name in names] for kind in kinds}
    return {"environment": environment(), "costs": costs, "traces": traces}


def _row(places: dict[int, tuple[int, int]]) -> list[list[int]]:
    found = [places.get(position, (0, 0)) for position in range(1, max(places) + 1)]
    return [list(column) for column in zip(*found, strict=True)]


# ── play ────────────────────────────────────────────────────────────────────────────────────────────────────


class World:
    """Seconds of an arm at a batch size, and what is accepted at every position of every sequence."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self.costs = {a: {int(b): s for b, s in one.items()} for a, one in recorded["costs"].items() if one}
        self.traces = {k: [np.array(row) for row in rows] for k, rows in recorded["traces"].items()}
        self.kinds = tuple(self.traces)
        self.lengths = [row.shape[1] for row in self.traces[self.kinds[0]]]
        self.arms = default_arms(self.kinds, trees=False)

    def _at(self, arm: str, rows: float) -> float:
        sizes, seconds = zip(*sorted(self.costs[arm].items()), strict=True)
        beyond = max(rows - sizes[-1], 0) * (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return float(np.interp(rows, sizes, seconds) + beyond)

    def seconds(self, arm: Strategy, size: int, num_drafted: int) -> float:
        """num_drafted: tokens of all chains; of learned chains it follows from the arm."""
        lookup = 60e-6 * size if arm.drafter in ("ngram", "hybrid") else 0.0
        if arm.drafter in ("none", "ngram"):
            return self._at("off", size + num_drafted) + lookup
        short, long = self._at("learned:1x1x1", size), self._at("learned:15x1x15", size)
        return short + (arm.depth - 1) / 14 * (long - short) + lookup

    def play(self, tuner: StrategyTuner, size: int, num: int, seed: int) -> float:
        """Returns the seconds of `num` responses, the tuner's own included."""
        rng, noise = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
        waiting, running = rng.integers(0, len(self.lengths), num).tolist(), list[list[int]]()
        total, ran = 0.0, set[tuple[int, Strategy]]()
        while waiting or running:
            admitted = [[waiting.pop(), 0] for _ in range(min(size - len(running), len(waiting)))]
            running += admitted
            batch = BatchState(len(running), 0, 0, len(admitted))
            start = time.thread_time()
            arm = tuner.choose(batch).strategy
            own = time.thread_time() - start
            accepted, drafted = list[int](), list[int]()
            for row, position in running if not arm.is_off else ():
                came, found = self.traces[arm.drafter][row][:, position].tolist()
                accepted.append(min(came, arm.depth))
                drafted.append(min(found, arm.depth))
            seconds = self.seconds(arm, len(running), sum(drafted))
            seen = seconds + (COLD if (len(running), arm) not in ran else 0.0) + (0.0 if ran else BEGIN)
            ran.add((len(running), arm))
            seen *= math.exp(noise.normal(0, NOISE))
            seen *= noise.uniform(*FACTORS) if noise.random() < DISTURBED else 1.0
            outcome = StepOutcome(len(running) + sum(accepted), tuple(accepted), tuple(drafted), seen)
            start = time.thread_time()
            tuner.observe(arm, batch, outcome)
            total += seconds + own + time.thread_time() - start - 2 * _CLOCK
            for one, more in zip(running, accepted or [0] * len(running), strict=True):
                one[1] += 1 + more
            running = [one for one in running if one[1] < self.lengths[one[0]]]
        return total


def _clock_seconds() -> float:
    return float(np.median([-time.thread_time() + time.thread_time() for _ in range(2000)]))


_CLOCK = _clock_seconds()
"""What reading the clock takes."""


@contextmanager
def changed(values: dict[str, Any]) -> Iterator[None]:
    """Sets constants of the tuner."""
    places = {name: cost_model if hasattr(cost_model, name) else acceptance for name in values}
    kept = {name: getattr(places[name], name) for name in values}
    for name, value in values.items():
        setattr(places[name], name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(places[name], name, value)


def over_best(world: World, size: int, seeds: range) -> dict[str, Any]:
    """Log speeds over the best fixed arm's, by variant and seed."""
    num = SIZES[size]
    arms = [arm for arm in world.arms if arm.drafter != "hybrid"]
    fixed = {a: np.array([world.play(Fixed(a), size, num, s) for s in seeds]) for a in arms}
    best = min(fixed, key=lambda arm: float(fixed[arm].mean()))
    cell: dict[str, Any] = {"best": str(best), "off": _logs(fixed[best], fixed[Strategy.OFF])}
    for name, values in VARIANTS.items():
        with changed(values):
            took = [world.play(_cold(world.kinds), size, num, seed) for seed in seeds]
        cell[name] = _logs(fixed[best], np.array(took))
    took = [world.play(_cold(world.kinds, "beg-mab"), size, num, seed) for seed in seeds]
    return {**cell, "beg-mab": _logs(fixed[best], np.array(took))}


def _cold(kinds: Sequence[str], name: str = "cost-model") -> StrategyTuner:
    tuner = make_tuner(Adaptive(), kinds, name, trees=False)
    assert tuner is not None
    return tuner


def _logs(best: Any, took: Any) -> list[float]:
    return [round(float(one), 4) for one in np.log(best / took)]


def render(report: dict[str, Any]) -> str:
    blocks = []
    for world, cells in report["worlds"].items():
        names = [name for name in next(iter(cells.values())) if name != "best"]
        rows = [[name, *(_told(cell.get(name)) for cell in cells.values())] for name in names]
        best = ["best fixed strategy", *(cell["best"] for cell in cells.values())]
        blocks += [f"## {world}", table(["", *(f"batch {size}" for size in cells)], [best, *rows])]
    about = (
        "Speed over the best fixed strategy's in hindsight, from a cold start: geometric mean over "
        f"{report['num_seeds']} seeds ± standard error."
    )
    return markdown("The tuner, piece by piece", report, about, *blocks, *report["notes"])


def _told(logs: list[float] | None) -> str:
    if logs is None:
        return "–"
    return f"{math.exp(np.mean(logs)):.3f} ± {np.std(logs) / math.sqrt(len(logs)):.3f}"


def main() -> None:
    parser = make_parser("tuner_ablation", __doc__, needs_out=False)
    parser.add_argument("what", choices=("record", "play"))
    parser.add_argument("sources", type=Path, nargs="+", help="a configuration to record, or worlds to play")
    parser.add_argument("--world", type=Path, help="the world's file to write")
    parser.add_argument("--size", type=int, default=16, help="batch size of the traces")
    parser.add_argument("--steps", type=int, default=260, help="of each trace")
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument(
        "--before", type=Path, help="figures of other tuners to put beside, by world and batch"
    )
    options, overrides = parser.parse_known_args()
    if options.what == "record":
        recorded = record(options.sources[0], overrides, options.size, options.steps)
        options.world.write_text(dumps(recorded) + "\n", encoding="utf-8")
        return
    if overrides:
        raise UserError(f"{overrides[0]}: play takes no such option")
    before = json.loads(options.before.read_text(encoding="utf-8")) if options.before else {"worlds": {}}
    worlds: dict[str, Any] = {}
    for path in options.sources:
        world, cells = World(json.loads(path.read_text(encoding="utf-8"))), dict[str, Any]()
        for size in [size for size in SIZES if size in world.costs["off"]]:
            others = before["worlds"].get(path.stem, {}).get(str(size), {})
            cells[str(size)] = {**over_best(world, size, range(options.seeds)), **others}
            print(f"{path.stem}, batch {size}: done", file=sys.stderr)
        worlds[path.stem] = cells
    report = {
        "command": command_of(parser),
        "environment": environment(),
        "num_seeds": options.seeds,
        "worlds": worlds,
        "notes": before.get("notes", []),
    }
    write_report(options.out, report, render(report))


if __name__ == "__main__":
    sys.exit(carry_out("tuner_ablation", main))

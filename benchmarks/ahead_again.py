"""What references bring where the same is asked again: an evaluation after more updates, and the runs of a sweep.

evaluation   held-out problems before training and after 1, 5 and 20 updates. At each policy in turns: with references to the
             responses before training, and without any.
replay       runs with learning rates 1e-5, 3e-5 and 1e-4, a step of each in turns: the second and third alone, and with
             --replay of the first; the first again, too, as after a change of code.

Retrieval remembers no responses here (drafter.ngram_tokens 0): in turns it would know those of the turn before.

python -m benchmarks.ahead_again evaluation --minutes 5 ; python -m benchmarks.ahead_again replay --minutes 5
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from tlt.bench.measure import Ratio
from tlt.bench.report import Changes, header, provenance, ratio_text, table, with_changes, write_report
from tlt.bench.train import responses, synchronize
from tlt.build.model import all_ranks
from tlt.config.load import load_config
from tlt.config.schema import Config
from tlt.distributed.launch import launch
from tlt.distributed.signals import StopRequest
from tlt.distributed.work_queue import connect_coordinator
from tlt.distributed.world import World, any_rank, gather_objects, shutdown
from tlt.files import write_json
from tlt.training.loop import advance
from tlt.training.rollout.phase import StopRequested
from tlt.training.rollout.result import PhaseResult
from tlt.training.run import Run, join_ranks
from tlt.training.start import preflight
from tlt.types import Request, UserError

UPDATES = (1, 5, 20)
RATES = ("1e-5", "3e-5", "1e-4")
COMMON = ("--run.journal=false", "--run.checkpoint_every=0", "--drafter.ngram_tokens=0", "--optimizer.warmup_steps=0")
PARTS = {
    "evaluation": (
        "--rollout.samples_per_problem=4",
        "--evaluation.num_problems=48",
        "--evaluation.samples_per_problem=2",
        "--evaluation.every=0",
    ),
    "replay": ("--evaluation.num_problems=0", "--rollout.samples_per_problem=4"),
}
Measured = list[dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """rounds: of each thing that is measured.  minutes: no round begins that would not end within them.  updates: after so many
    the evaluation is measured."""

    rounds: int
    minutes: float
    updates: tuple[int, ...]


class Clock:
    """Says whether there is time for another round; the ranks say the same."""

    def __init__(self, world: World, minutes: float) -> None:
        self.world, self.limit = world, 60 * minutes
        self.began, self.longest = time.perf_counter(), 0.0

    def time(self, work: Callable[[], T]) -> tuple[float, T]:
        """Does it on all ranks together. Returns the seconds from their beginning to the last one's end, and what it gave."""
        gather_objects(self.world, None)
        begun = time.perf_counter()
        result = work()
        gather_objects(self.world, None)
        return time.perf_counter() - begun, result

    def has_time(self, begun: float | None = None) -> bool:
        """begun: when the round before began; None: there was none."""
        now = time.perf_counter()
        self.longest = max(self.longest, 0.0 if begun is None else now - begun)
        return not any_rank(self.world, now - self.began + self.longest > self.limit)


def main(argument: str, stop: StopRequest) -> None:
    """Runs on every rank."""
    given = json.loads(argument)
    config = Config.from_json(given["config"])
    bounds = Bounds(**{**given["bounds"], "updates": tuple(given["bounds"]["updates"])})
    world = join_ranks(config)
    clock = Clock(world, bounds.minutes)
    coordinator = connect_coordinator(world.store, world.rank, world.world_size, timeout=world.timeout_seconds)
    measure = {"evaluation": evaluate_again, "replay": sweep}[given["part"]]
    with suppress(StopRequested):  # then nothing is reported
        measured = measure(config, bounds, clock, partial(Run, world=world, stop=stop, coordinator=coordinator, prints=False))
        if world.is_leader:
            write_json(config.run.out_dir / "measured.json", measured)
    shutdown(world)


# ── an evaluation again ──────────────────────────────────────────────────────────────────────────────────────────────


def evaluate_again(config: Config, bounds: Bounds, clock: Clock, make: Callable[[Config], Run]) -> Measured:
    """Returns a record for every evaluation."""
    measured: Measured = []
    run = make(config)
    try:
        params = dataclasses.replace(run.params, temperature=config.evaluation.temperature)
        known: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
        expected: dict[int, Any] = {}

        def turn(is_following: bool, index: int) -> PhaseResult:
            for key, token_ids in known.items():
                run.references.drop(key)
                if is_following:
                    run.references.keep(key, token_ids, 0)
            num = config.evaluation.samples_per_problem
            seconds, phase = clock.time(lambda: run.phase.run(run.held_out, num, params, "evaluation", 0))
            same = responses(phase) == expected.setdefault(run.step, responses(phase))
            stats, followed = phase.stats, sum(phase.stats.followed_by_age.values())
            about = {"updates": run.step, "round": index, "with": is_following, "seconds": seconds, "same": same}
            measured.append({**about, "steps": stats.num_steps, "tokens": stats.num_tokens, "followed": followed})
            return phase

        turn(False, -1)  # a fresh process is slow at first
        for updates in (0, *bounds.updates):
            while run.step < updates:
                advance(run)
            arms, begun = ((False,) if updates == 0 else (True, False)), None
            for index in range(bounds.rounds):
                if not clock.has_time(begun) and index:
                    break
                begun = time.perf_counter()
                for is_following in arms if index % 2 == 0 else reversed(arms):
                    phase = turn(is_following, index)
            if updates == 0:
                for one in phase.rollouts:
                    key = Request(one.problem_id, one.sample_index, one.prompt_ids, params, "evaluation").key
                    known[key] = one.token_ids
        return measured
    finally:
        run.close()


def summarize_evaluations(measured: Measured) -> Measured:
    """Returns a row for each number of updates."""
    first = [one["seconds"] for one in measured if one["updates"] == 0 and one["round"] >= 0]
    rows = []
    for updates in sorted({one["updates"] for one in measured} - {0}):
        those = [one for one in measured if one["updates"] == updates]
        with_them, without = ([one for one in those if one["with"] is is_following] for is_following in (True, False))
        seconds, alone = [one["seconds"] for one in with_them], [one["seconds"] for one in without]
        row = {"updates": updates, "seconds": seconds, "seconds_without": alone, "seconds_first": first}
        row["over_first"] = statistics.median(first) / statistics.median(seconds)
        row["over_without"] = dataclasses.asdict(Ratio.between(alone, seconds))
        row["followed_share"] = sum(one["followed"] for one in with_them) / sum(one["tokens"] for one in with_them)
        row["engine_steps"] = [statistics.mean(one["steps"] for one in arm) for arm in (with_them, without)]
        rows.append(row | {"different": sum(not one["same"] for one in those)})
    return rows


def evaluation_table(rows: Measured) -> str:
    columns = ["updates between", "with references, s", "without, s", "times as fast as the first", "times as fast as without"]
    columns += ["tokens kept of references", "engine steps, with / without", "turns with other responses"]
    lines = []
    for row in rows:
        steps = " / ".join(f"{steps:.0f}" for steps in row["engine_steps"])
        lines.append([row["updates"], spread(row["seconds"]), spread(row["seconds_without"]), f"{row['over_first']:.2f}"])
        lines[-1] += [ratio_text(row["over_without"]), f"{row['followed_share']:.0%}", steps, row["different"]]
    return f"The first: {spread(rows[0]['seconds_first'])} s.\n\n" + table(columns, lines)


# ── a sweep ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def configs_of(config: Config) -> dict[str, Config]:
    """Returns the runs by name: the first of all, and the others alone and with its replay."""
    folder = config.run.out_dir
    first, *others = RATES
    runs: dict[str, tuple[str, Changes]] = {first: (first, {"run": {"keep_responses": True}})}
    replay: Changes = {"rollout": {"replay": folder / first}}
    runs[f"{first} again"] = first, replay
    for rate in others:
        runs[rate], runs[f"{rate} replay"] = (rate, {}), (rate, replay)
    found = {}
    for name, (rate, changes) in runs.items():
        own: Changes = {"optimizer": {"learning_rate": float(rate)}, "run": {"out_dir": folder / name.replace(" ", "-")}}
        found[name] = with_changes(with_changes(config, own), changes)
    return found


def sweep(config: Config, bounds: Bounds, clock: Clock, make: Callable[[Config], Run]) -> Measured:
    """Returns a record for every step: the seconds of each run. A replay takes over the weights of its run alone where
    near-ties have fallen otherwise."""
    measured: Measured = []
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for name, changed in configs_of(config).items():
            runs[name] = make(changed)
            stack.callback(runs[name].close)
        first, *others = runs
        begun: float | None = None
        for step in range(bounds.rounds):
            if not clock.has_time(begun) and step:
                break
            begun, phases = time.perf_counter(), dict[str, PhaseResult]()
            seconds = {}
            for name in (first, *(others if step % 2 else reversed(others))):  # the first one's responses have to be there
                seconds[name], phases[name] = clock.time(partial(advance, runs[name]))
            measured.append({"step": step, "seconds": seconds, **compare(runs, phases)})
    return measured


def compare(runs: Mapping[str, Run], phases: Mapping[str, PhaseResult]) -> dict[str, Any]:
    """Returns, of each run with a replay, the responses that are not those of the same run alone, and the share of its tokens
    that was kept of references."""
    different, shares = {}, {}
    for name, run in runs.items():
        if run.config.rollout.replay is None:
            continue
        alone = name.partition(" ")[0]
        ours, theirs = responses(phases[name]), responses(phases[alone])
        different[name] = sum(a != b for a, b in zip(ours, theirs, strict=True))
        shares[name] = phases[name].stats.followed_by_age["replay"] / phases[name].stats.num_tokens
        if different[name] or not all(map(torch.equal, run.policy.parameters(), runs[alone].policy.parameters())):
            synchronize(run, runs[alone])
    return {"different": different, "followed_share": shares}


def summarize_sweep(measured: Measured) -> Measured:
    """Returns a row for each run, and one for the sweep. The first step of all is slow in a fresh process, and left out where
    there are more."""
    steps = measured[1:] or measured
    seconds = {name: [one["seconds"][name] for one in steps] for name in steps[0]["seconds"]}
    first, *others = RATES
    alone = [sum(values) for values in zip(*(seconds[rate] for rate in RATES), strict=True)]
    replay = [sum(values) for values in zip(seconds[first], *(seconds[f"{rate} replay"] for rate in others), strict=True)]
    pairs = {f"{rate} replay": (seconds[rate], seconds[f"{rate} replay"]) for rate in others}
    pairs = {f"{first} again": (seconds[first], seconds[f"{first} again"]), **pairs, "the sweep": (alone, replay)}
    rows = []
    for name, (base, with_it) in pairs.items():
        row: dict[str, Any] = {"name": name, "alone": base, "replay": with_it}
        row["ratio"] = dataclasses.asdict(Ratio.between(base, with_it))
        row["share"] = [one["followed_share"].get(name) for one in steps]
        rows.append(row | {"different": sum(one["different"].get(name, 0) for one in measured)})
    return rows


def sweep_table(rows: Measured) -> str:
    columns = ["run", "a step alone, s", "with --replay of the first, s", "all steps, s", "times as fast"]
    columns += ["tokens kept of the first run's, first and last step", "responses that differ"]
    lines = []
    for row in rows:
        shares = [f"{share:.0%}" for share in (row["share"][0], row["share"][-1]) if share is not None]
        total = f"{sum(row['alone']):.0f} / {sum(row['replay']):.0f}"
        lines.append([row["name"], spread(row["alone"]), spread(row["replay"]), total, ratio_text(row["ratio"])])
        lines[-1] += [" … ".join(shares) or "–", row["different"]]
    return table(columns, lines)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} – {max(seconds):.1f})"


def report_of(part: str, config: Config, measured: Measured, command: str) -> tuple[dict[str, Any], str]:
    summarize, draw = {"evaluation": (summarize_evaluations, evaluation_table), "replay": (summarize_sweep, sweep_table)}[part]
    rows = summarize(measured)
    report = {**header(config, command), "rows": rows, "measured": measured}
    title = {"evaluation": "# An evaluation again", "replay": "# A sweep with --replay"}[part]
    lead = "Seconds: medians (least – most). Ratios: geometric means of paired turns with 95 % intervals, above 1: faster."
    return report, "\n\n".join([title, *provenance(report), lead, draw(rows)]) + "\n"


def command_line() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--config", type=Path, default=Path("recipes/countdown/quickstart.toml"))
    parser.add_argument("--rounds", type=int, help="turns at each policy, 3, or steps of each run, 12, at most")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--updates", type=lambda text: [int(word) for word in text.split(",")], default=list(UPDATES))
    parser.add_argument("--out", type=Path)
    options, overrides = parser.parse_known_args()
    given = ["--run.out_dir", f"runs/ahead-again-{options.part}", "--run.num_steps=1000", *COMMON, *PARTS[options.part]]
    config = load_config(options.config, [*given, *overrides])
    if config.run.out_dir.exists():
        raise UserError(f"run.out_dir: {config.run.out_dir} exists; remove it, or give another --run.out_dir")
    preflight(config)
    config.run.out_dir.mkdir(parents=True)
    rounds = options.rounds or {"evaluation": 3, "replay": 12}[options.part]
    bounds = {"rounds": rounds, "minutes": options.minutes, "updates": options.updates}
    argument = json.dumps({"part": options.part, "config": config.to_json(), "bounds": bounds})
    code = launch(argument, all_ranks(config), "benchmarks.ahead_again:main", config.run.threads_per_rank)
    if code == 0:
        measured = json.loads((config.run.out_dir / "measured.json").read_text())
        command = " ".join(["python -m benchmarks.ahead_again", *sys.argv[1:]])
        out = options.out or Path("benchmarks/results") / f"ahead-{options.part}"
        write_report(out, *report_of(options.part, config, measured, command))
    return code


if __name__ == "__main__":
    try:
        sys.exit(command_line())
    except UserError as error:
        sys.exit(f"ahead_again: error: {error}")

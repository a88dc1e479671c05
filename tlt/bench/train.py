"""`tlt bench train`: whole RL runs side by side, with TLT and without, step by step in turns.

    step k        tlt: rollout │ update │ publish │ record        off: rollout │ update │ publish │ record
    step k + 1    off: …                                          tlt: …

All runs live in the same ranks, so that noise hits them alike; each has its own policy, optimizer, engine and folder. One
seed means one run: the same tokens, rewards and weights, exactly in float64. In float32 a near-tie may fall the other way.
Responses and weights that differ are counted, and the run is given the reference's weights and optimizer before the next
step, so that every pair of steps does the same work.

The runs stay in run.out_dir; the same command continues them. Nothing here is specific to what the runs change: the ablation
(benchmarks/ablation.py) gives others.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tlt.bench.measure import Ratio
from tlt.bench.report import Changes, number, provenance, ratio_text, table, with_changes
from tlt.config.schema import Config
from tlt.distributed.work_queue import connect_coordinator
from tlt.distributed.world import World, any_rank, gather_objects, init_process_group_from_env, shutdown
from tlt.report.console import Console
from tlt.report.metrics import StepRecord, read_metrics
from tlt.report.timeline import covered_seconds, critical_path_share, read_spans
from tlt.train.phase import PhaseResult, StopRequested
from tlt.train.run import Run, advance, device_name, load_problems
from tlt.types import Problem, Span, SpanName, UserError

if TYPE_CHECKING:
    from tlt.distributed.signals import StopRequest

OFF: Changes = {"rollout": {"speculation": "off"}, "drafter": {"path": None, "train": False}}
"""The same system without TLT."""
FROZEN: Changes = {"drafter": {"train": False}}
_PLAN = "TLT_BENCH_TRAIN"


@dataclass(frozen=True)
class Plan:
    """Which runs, by name, and what each changes of the configuration; the first is the reference.

    num_steps: of every run, those of earlier sessions included.  minutes: no round begins that would not end within them.
    shift: (step, task options): from this step on the problems are those of these options.
    """

    runs: Mapping[str, Changes]
    num_steps: int
    minutes: float
    shift: tuple[int, Mapping[str, Any]] | None = None

    def configs(self, config: Config) -> dict[str, Config]:
        """Of every run; each lives in a folder of its own."""
        folder = config.run.out_dir
        return {
            name: with_changes(with_changes(config, changes), {"run": {"out_dir": folder / name}})
            for name, changes in self.runs.items()
        }

    def problems(self, config: Config) -> Callable[[int], list[Problem]]:
        """The training problems as a function of the step."""
        before = load_problems(config, "train")
        if self.shift is None:
            return lambda step: before
        shift_step, options = self.shift
        after = load_problems(with_changes(config, {"task": {"options": options}}), "train")
        return lambda step: before if step < shift_step else after


@dataclass(frozen=True)
class Turn:
    """One step of one run: a line of turns.jsonl, beside the run's own metrics.

    seconds: from when all ranks began to when all were done, the record written.  num_solved_problems: with a solved response.
    digest: of all token ids and rewards.
    num_different: responses whose tokens or reward are not the reference's.  same_weights: bit for bit, after the step.
    """

    run: str
    step: int
    seconds: float
    num_solved_problems: int
    num_different: int
    same_weights: bool
    digest: str


# ── measuring, on every rank ─────────────────────────────────────────────────────────────────────────────────────────


def launch_runs(config: Config, plan: Plan) -> int:
    """Runs the plan on the configuration's ranks; returns the exit code. The plan travels in the environment, since
    `launch` carries the configuration alone."""
    from tlt.distributed.launch import launch

    check_folder(config, plan)
    os.environ[_PLAN] = json.dumps(dataclasses.asdict(plan), default=str)
    return launch(config.to_json(), config.run.num_ranks, "tlt.bench.train:main", config.run.threads_per_rank)


def check_folder(config: Config, plan: Plan) -> None:
    """Raises UserError unless the runs can begin, or go on, in run.out_dir."""
    folder = config.run.out_dir
    for name, changed in plan.configs(config).items():
        written = folder / name / "config.json"
        if written.exists() and Config.from_json(written.read_text(), str(written)) != changed:
            raise UserError(f"run.out_dir: {folder} holds runs of another configuration; give another --run.out_dir")


def main(config_json: str, stop: StopRequest) -> None:
    """What every rank runs."""
    config = Config.from_json(config_json)
    torch.set_num_threads(config.run.threads_per_rank)
    world = init_process_group_from_env(device_name(config))
    take_turns(config, Plan(**json.loads(os.environ[_PLAN])), world, stop)
    shutdown(world)


def take_turns(config: Config, plan: Plan, world: World, stop: StopRequest) -> None:
    """Rounds of one step of every run until the plan is fulfilled or its time is over; then all are checkpointed together.
    When the user stops, the round under way is dropped, and these runs cannot go on."""
    started, longest = time.perf_counter(), 0.0
    path = config.run.out_dir / "turns.jsonl"
    coordinator = connect_coordinator(world.store, world.rank, world.world_size, timeout=600.0)
    runs: dict[str, Run] = {}
    with ExitStack() as stack:
        console = stack.enter_context(Console(enabled=world.is_leader))
        for name, changed in plan.configs(config).items():
            runs[name] = Run(changed, world, stop, coordinator, prints=False)
            stack.callback(runs[name].close)
        reference = next(iter(runs.values()))
        num_done = {number for name, turns in read_turns(path, runs).items() for number in (runs[name].step, len(turns))}
        if len(num_done) > 1:
            raise UserError(f"run.out_dir: the runs in {config.run.out_dir} did not end together; give another --run.out_dir")
        problems = plan.problems(config)
        while reference.step < plan.num_steps:
            begun = time.perf_counter()
            if any_rank(world, begun - started + longest > 60 * plan.minutes):
                break
            for run in runs.values():
                run.problems = problems(reference.step)
            try:
                turns = one_round(runs, world)
            except StopRequested:
                return
            longest = max(longest, time.perf_counter() - begun)
            if world.is_leader:
                with path.open("a") as file:
                    file.writelines(json.dumps(dataclasses.asdict(turn)) + "\n" for turn in turns)
            console.note(describe_round(turns))
        for run in runs.values():
            run.checkpoint()
            run.checkpoints.wait()


def one_round(runs: Mapping[str, Run], world: World) -> list[Turn]:
    """One step of every run, the order turned from round to round. In the first one the reference comes last: what a fresh
    process is slow at is not held against it."""
    names = list(runs)
    reference = runs[names[0]]
    step = reference.step
    phases: dict[str, PhaseResult] = {}
    seconds: dict[str, float] = {}
    for name in names if step % 2 else reversed(names):
        gather_objects(world, None)  # together
        begun = time.perf_counter()
        phases[name] = advance(runs[name])
        gather_objects(world, None)
        seconds[name] = time.perf_counter() - begun
    turns = []
    for name, run in runs.items():
        phase, expected = phases[name], phases[names[0]]
        turn = Turn(
            name,
            step,
            seconds[name],
            num_solved_problems=len({s.problem_id for s, r in zip(phase.rollouts, phase.rewards, strict=True) if r.is_solved}),
            num_different=sum(a != b for a, b in zip(responses(phase), responses(expected), strict=True)),
            same_weights=all(map(torch.equal, run.policy.parameters(), reference.policy.parameters())),
            digest=hashlib.sha256(repr(responses(phase)).encode()).hexdigest()[:16],
        )
        turns.append(turn)
        if turn.num_different or not turn.same_weights:
            synchronize(run, reference)
    return turns


def responses(phase: PhaseResult) -> list[tuple[str, int, tuple[int, ...], float]]:
    """All that the update makes of a phase: (problem, sample, tokens, reward), in canonical order."""
    pairs = zip(phase.rollouts, phase.rewards, strict=True)
    return [(rollout.problem_id, rollout.sample_index, rollout.token_ids, reward.value) for rollout, reward in pairs]


def synchronize(run: Run, reference: Run) -> None:
    """Gives `run` the reference's policy and optimizer."""
    run.policy.load_state_dict(reference.policy.state_dict())
    run.trainer.load_state_dict(copy.deepcopy(reference.trainer.state_dict()))
    run.publish(run.step)


def describe_round(turns: Sequence[Turn]) -> str:
    different = sum(turn.num_different for turn in turns)
    same = "same tokens" if not different else f"{different} responses differ"
    return f"step {turns[0].step}: {', '.join(f'{t.run} {t.seconds:.1f} s' for t in turns)}; {same}"


# ── what it showed ───────────────────────────────────────────────────────────────────────────────────────────────────


def ceiling(rollout_share: float, rollout_speedup: float) -> float:
    """How much faster a step can get where only its rollout does: 1 / (1 - r + r / S)."""
    return 1 / (1 - rollout_share + rollout_share / rollout_speedup)


def read_turns(path: Path, names: Iterable[str]) -> dict[str, list[Turn]]:
    """By run; no file is no turns."""
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for line in path.read_text().splitlines() if path.exists() else ():
        turn = Turn(**json.loads(line))
        if turn.run not in turns:
            raise UserError(f"run.out_dir: {path.parent} holds a run {turn.run!r}; include it, or give another --run.out_dir")
        turns[turn.run].append(turn)
    return turns


def phase_seconds(spans_by_rank: Mapping[int, Sequence[Span]]) -> dict[str, float]:
    """Seconds per step under each name, mean over ranks; `other` is what no span covers. Spans may overlap: what several
    cover (training that is preempted) counts under each of their names."""
    seconds: dict[str, float] = defaultdict(float)
    num_steps = 0
    for spans in spans_by_rank.values():
        for step in (span for span in spans if span.name == SpanName.STEP):
            num_steps += 1
            within = [s for s in spans if s.name != SpanName.STEP and step.start <= s.start and s.end <= step.end]
            for span in within:
                seconds[span.name] += span.end - span.start
            covered = covered_seconds(within, {span.name for span in within}, step.start, step.end)
            seconds["other"] += step.end - step.start - covered
    return {name: value / num_steps for name, value in seconds.items()}


def summarize(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Of the runs in `folder`, over the rounds that all of them finished; the first of the names is the reference.

    ratios: of step seconds, base / run, for every run and base.  rollout_speedup S, ceilings: over the reference.
    """
    turns = read_turns(folder / "turns.jsonl", names)
    reference, *others = names
    num_steps = len(turns[reference])
    if num_steps == 0:
        raise UserError("bench: not one round was finished; give it more --minutes")
    records = {name: read_metrics(folder / name / "metrics.jsonl")[:num_steps] for name in names}
    runs = {name: summarize_run(records[name], turns[name], read_spans(folder / name)) for name in names}
    share = runs[reference]["rollout_share"]
    for name in others:
        speedup = _paired([r.rollout_seconds for r in records[reference]], [r.rollout_seconds for r in records[name]])
        runs[name] |= {
            "rollout_speedup": dataclasses.asdict(speedup),
            "ceiling": ceiling(share, speedup.mean),
            "ceiling_of_free_rollout": ceiling(share, math.inf),
            "ratios": {
                base: dataclasses.asdict(_paired([t.seconds for t in turns[base]], [t.seconds for t in turns[name]]))
                for base in names
                if base != name
            },
        }
    return {"num_steps": num_steps, "runs": runs}


def summarize_run(records: Sequence[StepRecord], turns: Sequence[Turn], spans: Mapping[int, Sequence[Span]]) -> dict[str, Any]:
    """Seconds and CPU-seconds are per step, of idle time summed over ranks; None where there is nothing to divide by."""
    num_steps = len(turns)
    step_seconds = sum(turn.seconds for turn in turns)
    cpu_seconds = sum(record.cpu_seconds for record in records)
    idle_seconds = sum(record.idle_seconds for record in records)
    num_solved = sum(turn.num_solved_problems for turn in turns)
    lengths = [record.accept_length for record in records if not math.isnan(record.accept_length)]
    phases = phase_seconds(spans)
    phases["record"] = (step_seconds - sum(record.step_seconds for record in records)) / num_steps
    return {
        "step_seconds": step_seconds / num_steps,
        "phase_seconds": phases,
        "rollout_share": sum(record.rollout_seconds for record in records) / step_seconds,
        "cpu_seconds": cpu_seconds / num_steps,
        "cpu_seconds_per_solved_problem": cpu_seconds / num_solved if num_solved else None,
        "reward_mean": statistics.mean(record.reward_mean for record in records),
        "num_responses": sum(record.num_responses for record in records),
        "num_tokens": sum(record.num_tokens for record in records),
        "accept_length": statistics.mean(lengths) if lengths else None,
        "idle_seconds": idle_seconds / num_steps,
        "harvested_share": sum(record.drafter_train_seconds for record in records) / idle_seconds if idle_seconds else None,
        "num_migrated": sum(record.num_migrated for record in records) / num_steps,
        "drafter_training_on_critical_path": critical_path_share(spans),
        "num_different": sum(turn.num_different for turn in turns),
        "first_different_step": next((turn.step for turn in turns if turn.num_different), None),
        "num_steps_with_same_weights": sum(turn.same_weights for turn in turns),
        "steps": [
            {
                "seconds": turn.seconds,
                "rollout_seconds": record.rollout_seconds,
                "update_seconds": record.update_seconds,
                "cpu_seconds": record.cpu_seconds,
                "accept_length": record.accept_length,
                "drafter_version": record.drafter_version,
                "reward_mean": record.reward_mean,
                "num_different": turn.num_different,
                "digest": turn.digest,
            }
            for record, turn in zip(records, turns, strict=True)
        ],
    }


def _paired(base: Sequence[float], other: Sequence[float]) -> Ratio:
    return Ratio.of([a / b for a, b in zip(base, other, strict=True)])


def to_markdown(title: str, report: Mapping[str, Any]) -> str:
    """The report for people: the runs side by side, the reference first."""
    runs: dict[str, Any] = report["runs"]
    reference, *others = runs
    off, config = runs[reference], report["config"]

    def values(title: str, key: str, form: str = ".2f") -> list[str]:
        return [title, *(number(run.get(key), form) for run in runs.values())]

    def ratios(title: str, ratio_of: Iterable[Mapping[str, Any] | None]) -> list[str]:
        return [title, *("–" if ratio is None else ratio_text(ratio) for ratio in ratio_of)]

    rows = [
        values("step, s", "step_seconds"),
        *(
            ratios(f"step time, {base} / run", (run.get("ratios", {}).get(base) for run in runs.values()))
            for base in (reference, *others[1:])
        ),
        ratios(f"rollout time, {reference} / run (S)", (run.get("rollout_speedup") for run in runs.values())),
        values(f"ceiling 1 / (1 - r + r / S), r = {off['rollout_share']:.1%}", "ceiling"),
        values("ceiling if rollouts took no time", "ceiling_of_free_rollout"),
        values("accept length", "accept_length"),
        values("CPU-seconds per step", "cpu_seconds"),
        values("CPU-seconds per solved problem", "cpu_seconds_per_solved_problem"),
        values("mean reward", "reward_mean", ".4f"),
        values("responses per step that changed ranks", "num_migrated", ".1f"),
        values("idle rank-seconds per step", "idle_seconds"),
        values("of these, drafter training", "harvested_share", ".1%"),
        values("drafter training on the critical path (spans)", "drafter_training_on_critical_path", ".2%"),
        values(f"responses that differ from {reference}'s, of {off['num_responses']}", "num_different", "d"),
        values("first step with a difference", "first_different_step", "d"),
        values(f"steps that end with {reference}'s very weights", "num_steps_with_same_weights", "d"),
    ]
    names = sorted({name for run in runs.values() for name in run["phase_seconds"]}, key=_place)
    phases = [[name, *(number(run["phase_seconds"].get(name), ".3f") for run in runs.values())] for name in names]
    described = (
        f"{report['num_steps']} steps of {off['num_responses'] // report['num_steps']} responses"
        f" ({off['num_tokens'] / off['num_responses']:.0f} tokens on average), {config['run']['num_ranks']} ranks,"
        f" {config['run']['dtype']}. The runs took their steps in turns; ratios are geometric means of paired steps with"
        " 95 % intervals, above 1: faster. In float32 a near-tie may fall the other way; the run then got the reference's"
        " weights before the next step."
    )
    blocks = [f"# {title}", *provenance(report), described, table(["", *runs], rows)]
    blocks += ["## Seconds per step, mean over ranks", table(["phase", *runs], phases)]
    return "\n\n".join(blocks) + "\n"


def _place(phase: str) -> tuple[int, str]:
    """Where a phase stands in the table: in the order of a step, unknown names after it, what no span covers last."""
    order = [*SpanName, "unknown", "record", "other"]
    return order.index(phase if phase in order else "unknown"), phase

"""Whole RL runs side by side, with TLT and without, step by step in turns.

    python -m benchmarks.train recipes/countdown/headline.toml --out RESULT --variants tlt,frozen --steps 20

    step k        tlt: rollout │ update │ publish │ record        off: rollout │ update │ publish │ record
    step k + 1    off: …                                          tlt: …

All runs live in the same ranks, so that noise hits them alike; each has its own policy, optimizer, engine and
folder. With one seed all runs have the same tokens, rewards and weights, exactly in float64; in float32 a
near-tie may fall the other way. Responses and weights that differ are counted, and the run then gets the
reference's weights and optimizer, so that every pair of steps does the same work.

The runs stay in run.out_dir; the same command continues them. train_report.py reports them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.command import carry_out, command_of, make_parser, words
from benchmarks.grown import grown_config, hold_still, plan_growth
from benchmarks.report import Changes, header, side_by_side, with_changes, write_report
from benchmarks.train_report import Turn, read_turns, summarize_runs, train_markdown
from tlt.apps.run.start import pin, preflight
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.types import UserError
from tlt.training.build.layout import join_ranks
from tlt.training.loop import advance
from tlt.training.ranks.world import World, any_rank, gather_objects, shutdown
from tlt.training.report.console import Console
from tlt.training.rollout.phase import StopRequested
from tlt.training.rollout.result import PhaseResult
from tlt.training.rollout.work_queue import connect_work_queue
from tlt.training.run import Run
from tlt.training.saved.inputs import files_of
from tlt.training.saved.run_folder import claim

if TYPE_CHECKING:
    from tlt.training.launch.signals import StopRequest

OFF: Changes = {
    "rollout": {"speculation": "off", "ahead": 0},
    "drafter": {"path": None, "train": False},
}
"""Changes the configuration into the same system without TLT: no drafts, no references kept or generated."""

VARIANTS: Mapping[str, Changes] = {
    "tlt": {},
    "frozen": {"drafter": {"train": False}},
    "retrieval": {"drafter": {"path": None, "train": False}},
    "ahead": {"rollout": {"ahead": "adaptive"}},
}
"""The runs that can be compared with off, by their changes of the configuration."""


@dataclass(frozen=True)
class Plan:
    """The runs to compare, and for how long."""

    runs: Mapping[str, Changes]
    """Each run's changes of the configuration, by name; the first run is the reference."""
    num_steps: int
    """Steps of every run, those of earlier sessions included."""
    minutes: float
    """Time limit: no round begins that would not end within it."""

    def configs(self, config: Config) -> dict[str, Config]:
        """Returns every run's configuration. Each run has a folder of its own."""
        folder, config = config.run.out_dir, side_by_side(config)
        return {
            name: with_changes(with_changes(config, changes), {"run": {"out_dir": folder / name}})
            for name, changes in self.runs.items()
        }


def launch_runs(config: Config, plan: Plan) -> int:
    """Runs the plan on the configuration's ranks and returns the exit code.

    Raises UserError unless the runs can begin or continue in run.out_dir.
    """
    from tlt.training.build.ranks import all_ranks
    from tlt.training.launch.local import launch

    folder = config.run.out_dir
    for name, changed in plan.configs(config).items():
        written = folder / name / "config.json"
        if written.exists() and Config.from_json(written.read_text(), str(written)) != changed:
            raise UserError(
                f"run.out_dir: {folder} holds runs of another configuration; give another --run.out_dir"
            )
        claim(folder / name, files_of(changed), goes_on=written.exists())
    argument = json.dumps({"config": config.to_json(), "plan": dataclasses.asdict(plan)}, default=str)
    return launch(argument, all_ranks(config), "benchmarks.train:run_rank", config.run.threads_per_rank)


def run_rank(argument: str, stop: StopRequest) -> None:
    """Runs the plan on one rank. argument: from launch_runs."""
    given = json.loads(argument)
    config = Config.from_json(given["config"])
    world = join_ranks(config)
    take_turns(config, Plan(**given["plan"]), world, stop)
    shutdown(world)


def take_turns(config: Config, plan: Plan, world: World, stop: StopRequest) -> None:
    """Takes one step of every run per round until the plan is fulfilled or its time is over; then checkpoints
    all runs.

    When the user stops it, the current round is dropped, and these runs cannot be continued.
    Raises UserError where the runs in the folder did not end together.
    """
    started, longest = time.perf_counter(), 0.0
    path = config.run.out_dir / "turns.jsonl"
    queue = connect_work_queue(world.store, world.rank, world.world_size, timeout=world.timeout_seconds)
    runs: dict[str, Run] = {}
    with ExitStack() as stack:
        console = stack.enter_context(Console(enabled=world.is_leader))
        for name, changed in plan.configs(config).items():
            runs[name] = Run(changed, world, stop, queue, prints=False)
            stack.callback(runs[name].close)
        reference = next(iter(runs.values()))
        num_done = {run.step for run in runs.values()} | set(map(len, read_turns(path, runs).values()))
        if len(num_done) > 1:
            found = f"the runs in {config.run.out_dir} did not end together"
            raise UserError(f"run.out_dir: {found}; give another --run.out_dir")
        while reference.step < plan.num_steps:
            begun = time.perf_counter()
            if any_rank(world, begun - started + longest > 60 * plan.minutes):
                break
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
            run.files.checkpoints.wait()


def one_round(runs: Mapping[str, Run], world: World) -> list[Turn]:
    """Takes one step of every run, in alternating order. Returns a Turn for each.

    In the first round the reference comes last, so that a fresh process does not count against it.
    """
    names = list(runs)
    reference = runs[names[0]]
    step = reference.step
    phases: dict[str, PhaseResult] = {}
    seconds: dict[str, float] = {}
    for name in names if step % 2 else reversed(names):
        gather_objects(world, None)  # a barrier
        begun = time.perf_counter()
        phases[name] = advance(runs[name])
        gather_objects(world, None)
        seconds[name] = time.perf_counter() - begun
    turns = []
    expected = responses(phases[names[0]])
    for name, run in runs.items():
        found = responses(phases[name])
        turn = Turn(
            name,
            step + 1,
            seconds[name],
            num_different=sum(a != b for a, b in zip(found, expected, strict=True)),
            same_weights=all(map(torch.equal, run.policy.parameters(), reference.policy.parameters())),
            digest=hashlib.sha256(repr(found).encode()).hexdigest()[:16],
        )
        turns.append(turn)
        if turn.num_different or not turn.same_weights:
            synchronize(run, reference)
    return turns


def responses(phase: PhaseResult) -> list[tuple[str, int, tuple[int, ...], float]]:
    """Returns all of a phase that the update depends on: (problem, sample, tokens, reward), in canonical
    order."""
    pairs = zip(phase.rollouts, phase.rewards, strict=True)
    return [(r.problem_id, r.sample_index, r.token_ids, reward.value) for r, reward in pairs]


def synchronize(run: Run, reference: Run) -> None:
    """Gives `run` the reference's policy and optimizer."""
    theirs = reference.models.trainer.tensors()
    with torch.no_grad():
        for name, tensor in run.models.trainer.tensors().items():
            tensor.copy_(theirs[name])
    run.models.trainer.restore(reference.models.trainer.counters())
    run.publish(run.step)


def describe_round(turns: Sequence[Turn]) -> str:
    """Returns a round as one line for the screen."""
    different = sum(turn.num_different for turn in turns)
    same = "same tokens" if not different else f"{different} responses differ"
    return f"step {turns[0].step}: {', '.join(f'{t.run} {t.seconds:.1f} s' for t in turns)}; {same}"


def main() -> int:
    parser = make_parser("train", __doc__)
    parser.add_argument(
        "config", type=Path, help="a run's configuration or recipe; --section.key VALUE overrides it"
    )
    parser.add_argument("--geometry", help="grow model and drafter (grown.py); learning rates are almost 0")
    parser.add_argument("--variants", type=words, default=("tlt", "frozen"), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument(
        "--steps", type=int, default=20, help="of every run, those of earlier sessions included"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="no step begins that would not end in time"
    )
    options, overrides = parser.parse_known_args()
    if unknown := set(options.variants) - VARIANTS.keys():
        raise UserError(f"--variants: {min(unknown)!r} is unknown; give some of {', '.join(VARIANTS)}")
    config = pin(load_config(options.config, hold_still(overrides) if options.geometry else overrides))
    preflight(config, trains=options.geometry is None)
    runs = {"off": OFF, **{name: VARIANTS[name] for name in options.variants}}
    growth = None if options.geometry is None else plan_growth(config, options.geometry)
    with grown_config(config, growth, keep=config.run.out_dir / "grown") as (config, geometry):
        code = launch_runs(config, Plan(runs, options.steps, options.minutes))
    if code in (0, 130, 143):
        summary = summarize_runs(config.run.out_dir, tuple(runs))
        report = {**header(config, command_of(parser)), **geometry, **summary}
        write_report(options.out, report, train_markdown("Whole steps with and without TLT", report))
    return code


if __name__ == "__main__":
    sys.exit(carry_out("train", main))

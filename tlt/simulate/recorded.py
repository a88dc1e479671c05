"""Assumptions that a run has measured itself: what it has kept is read, and nothing of it is run again.

metrics.jsonl            seconds of steps outside of the rollout
responses/ (if kept)     lengths, problem by problem; else log-normal ones, as metrics.jsonl describes them
checkpoints/, by rank    the tuner's step costs and acceptance, how far references led, the speed of the drafter's training
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.accounts import IdleUse
from tlt.config.schema import Config
from tlt.drafter.drafting.ahead import AHEAD, ahead_kinds
from tlt.drafter.drafting.continuations import match_bucket
from tlt.drafter.drafting.hybrid import drafter_kinds
from tlt.drafter.drafting.suffix_index import ANCHORS
from tlt.files import read_jsonl
from tlt.report.metrics import StepRecord, read_metrics
from tlt.simulate.assumptions import Agreement, Assumptions, Followed, Lengths, LogNormalLengths, RecordedLengths, SpotSpeed
from tlt.simulate.gpu import AGREEMENT, describe_agreement, describe_change
from tlt.simulate.measured import FittedSeconds, Measured
from tlt.training.rollout.idle_choice import HORIZON
from tlt.training.saved.manifest import latest_checkpoint, read_manifest, verify
from tlt.tuning.cost_model import CostModel
from tlt.tuning.tuner import default_arms
from tlt.types import Strategy, UserError

ENOUGH_STEPS = 100
"""Engine steps without speculation that tell what those cost. From three of them off came out four times too slow."""


@dataclass(frozen=True)
class RecordedRun:
    """What a run has kept. ranks: of the latest checkpoint, the state of each.  lengths: step → problem → lengths of its
    responses, in the order of the file; empty: they were not kept."""

    folder: Path
    config: Config
    steps: Sequence[StepRecord]
    ranks: Sequence[dict[str, Any]]
    lengths: Sequence[dict[str, list[int]]]


def read_run(folder: Path) -> RecordedRun:
    """Reads a run. Raises UserError where something lacks that a simulation rests on."""
    if not (folder / "config.json").is_file():
        raise UserError(f"--run: {folder} is no run's folder (it has no config.json); give the run.out_dir of a run")
    config = Config.from_json((folder / "config.json").read_text(encoding="utf-8"), str(folder / "config.json"))
    steps = read_metrics(folder / "metrics.jsonl")
    if not steps or (checkpoint := latest_checkpoint(folder / "checkpoints")) is None:
        lacks = "has no checkpoint" if steps else "has finished no step"
        raise UserError(f"--run: {folder} {lacks}, which costs are read from; give a run that has ended")
    manifest = read_manifest(checkpoint)
    names = [f"rank-{rank:05d}.json" for rank in range(manifest.num_ranks)]
    verify(checkpoint, manifest, names)
    ranks = [json.loads((checkpoint / name).read_text(encoding="utf-8")) for name in names]
    if not all(rank["tuner"].get("costs", {}).get("num_steps") for rank in ranks):
        raise UserError(
            f"--run: {folder} has measured no step costs; give a run with rollout.speculation adaptive and tuner cost-model"
        )
    files = sorted((folder / "responses").glob("rollout-*.jsonl"))
    return RecordedRun(folder, config, steps, ranks, [read_lengths(file) for file in files])


def read_lengths(path: Path) -> dict[str, list[int]]:
    """Returns the lengths of the responses in a file that a run has kept, by problem."""
    found: dict[str, list[int]] = {}
    for place, record in read_jsonl(path, "--run"):
        if not isinstance(record.get("problem_id"), str) or not isinstance(record.get("token_ids"), list):
            raise UserError(f"{place}: is no response with problem_id and token_ids; repair the file, or remove it")
        found.setdefault(record["problem_id"], []).append(len(record["token_ids"]))
    return found


def assume_recorded(run: RecordedRun, config: Config, interference: float = 0.0) -> Assumptions:
    """Returns what a run of this configuration rests on, as another one has measured it."""
    lengths, lengths_line = lengths_of(run, config.sampling.max_tokens)
    agreement, agreement_line = agreement_of(run)
    spot, spot_line = spot_of(run)
    other = [step.step_seconds - step.rollout_seconds for step in run.steps]
    rollout, overhead, optimism = config.rollout, overhead_of(run), optimism_of(run)
    return Assumptions(
        lengths=lengths,
        engines=[measured_by(rank, run.config, overhead, optimism) for rank in run.ranks],
        agreement=agreement,
        spot=spot,
        num_samples=rollout.samples_per_problem,
        max_batch_size=rollout.max_batch_size,
        max_tokens=config.sampling.max_tokens,
        prompt_tokens=prompt_tokens_of(run),
        read_seconds=spot.recompute,
        other_seconds=other,
        references_mib=rollout.references_mib,
        knows_off=num_measured(run, Strategy.OFF) >= ENOUGH_STEPS,
        interference=interference,
        per_host=len(run.ranks),
        seed=config.run.seed,
        lines=(
            lengths_line,
            f"costs and acceptance: as the {len(run.ranks)} tuner(s) of the run had measured them in {len(run.steps)} steps;"
            f" what it never ran is extrapolated; it has made {num_measured(run, Strategy.OFF):.0f} steps without speculation,"
            f" and with fewer than {ENOUGH_STEPS} nothing is said of off",
            f"a replica at work takes {overhead:.3f} s for each second of its engine's steps, and these {optimism:.2f} times"
            " as long as the tuners expected of what they chose, as in the run",
            agreement_line,
            spot_line,
            f"a step outside of the rollout: {statistics.mean(other):.2f} s on average, the same for any number of replicas",
            f"idle work makes a busy replica's steps {interference:.0%} longer when all others of its host do some",
        ),
    )


def overhead_of(run: RecordedRun) -> float:
    """Returns the seconds that a rank was at work for a second of its engine's steps: it also reads prompts, asks and tells."""
    at_work = sum(len(run.ranks) * step.rollout_seconds - step.idle_seconds for step in run.steps)
    return max(at_work / sum(sum(step.strategy_seconds.values()) for step in run.steps), 1.0)


def optimism_of(run: RecordedRun) -> float:
    """Returns how many times as many tokens a second the tuners expected of their choices as came: what looks best of many is
    seldom as good as it looks."""
    expected = came = 0.0
    for step in run.steps:
        for strategy, speed in step.strategy_predicted.items():
            if math.isfinite(speed):
                expected += speed * step.strategy_seconds[strategy]
                came += step.strategy_speed[strategy] * step.strategy_seconds[strategy]
    return expected / came if came else 1.0


def measured_by(rank: dict[str, Any], config: Config, overhead: float = 1.0, optimism: float = 1.0) -> Measured:
    """Returns the engine of a rank as its tuner knew it, without the bonus for what is uncertain: nothing is learned here."""
    model = CostModel(default_arms(ahead_kinds(drafter_kinds(config.drafter.path is not None))), explores=False)
    model.restore(rank["tuner"])
    model.acceptance.forget_the_latest()
    return Measured(model, FittedSeconds(model, overhead * optimism), optimism)


def num_measured(run: RecordedRun, arm: Strategy) -> float:
    """Returns the engine steps with this arm that the tuners have seen."""
    engines = [measured_by(rank, run.config) for rank in run.ranks]
    return sum(one.model.costs.num_steps.get(arm, 0) for one in engines)


def lengths_of(run: RecordedRun, cap: int) -> tuple[Lengths, str]:
    """Returns the lengths and a line about them. cap: no response is longer."""
    if run.lengths:
        kept = [[[min(length, cap) for length in group] for group in step.values()] for step in run.lengths]
        return RecordedLengths(kept), f"lengths: those of the {len(kept)} steps that the run has kept"
    median = statistics.mean(step.response_tokens.p50 for step in run.steps)
    p95 = max(statistics.mean(step.response_tokens.p95 for step in run.steps), 1.001 * median)
    line = f"half above {median:,.0f} tokens, one in twenty above {p95:,.0f}, cut at {cap:,}"
    line = f"lengths: log-normal, as metrics.jsonl describes them ({line}); run.keep_responses would have kept the very ones"
    return LogNormalLengths(median, p95, cap, run.config.run.seed), line


def agreement_of(run: RecordedRun) -> tuple[Agreement, str]:
    """Returns how far references lead: as the run has measured it, if it followed any, and two updates later by as much less as
    was measured elsewhere."""
    threshold = run.config.drafter.confidence_threshold
    hits = [rank["drafting"][AHEAD] for rank in run.ranks if AHEAD in rank["drafting"]]
    if not any(sum(step.followed_by_age.values()) for step in run.steps) or not hits:
        source = "the run followed none: measured on the shipped model at learning rate 1e-4"
        return Agreement(AGREEMENT, threshold), describe_agreement(AGREEMENT, source)
    first = _mean_run([case[0][0] for case in hits])
    stretch = _mean_run([pair for case in hits for cells in case[1:] for pair in cells[match_bucket(ANCHORS[-1]) :]])
    older = AGREEMENT[2].first / AGREEMENT[1].first
    by_age = {1: Followed(first, stretch, stretch), 2: Followed(first * older, stretch, 2 * stretch)}
    return Agreement(by_age, threshold), describe_agreement(by_age, "as far as the run's drafter has followed them")


def _mean_run(pairs: Sequence[Sequence[float]]) -> float:
    """Returns the tokens kept until one is not, from (kept, tried)."""
    kept, tried = (sum(pair[i] for pair in pairs) for i in (0, 1))
    return float(tried / max(tried - kept, 1e-6))


def spot_of(run: RecordedRun) -> tuple[SpotSpeed, str]:
    """Returns how fast the drafter was trained in idle time."""
    drafter = run.config.drafter
    known = [rank["drafter"].get("seconds_per_token", [None, None]) for rank in run.ranks]
    train, recompute = ([pair[i] for pair in known if pair[i] is not None] for i in (0, 1))
    limits = drafter.tokens_per_micro_step, drafter.carry_longest
    if not train:
        return SpotSpeed(0.0, statistics.mean(recompute or [0.0]), 0.0, *limits), "the run trained no drafter"
    speed = SpotSpeed(statistics.mean(train), statistics.mean(recompute or train), drafter.max_passes, *limits, change_of(run))
    line = f"drafter training: {1e6 * speed.train:.0f} µs a token, recomputing its features {1e6 * speed.recompute:.0f}"
    return speed, f"{line}; {describe_change(speed.change)}, by what the run knew at its end (idle_gain)"


def change_of(run: RecordedRun) -> float:
    """Returns the change of 1 + acceptance by a step's training, as a share of it: of what the run's choice took a second of it
    to be worth (training/rollout/idle_choice.py)."""
    seconds = statistics.mean(step.idle_seconds_by_use.get(IdleUse.TRAIN.value, 0.0) for step in run.steps)
    rollout = statistics.mean(step.rollout_seconds for step in run.steps)
    return float(run.steps[-1].idle_gain.get(IdleUse.TRAIN.value, 0.0) * seconds / (rollout * HORIZON))


def prompt_tokens_of(run: RecordedRun) -> int:
    """Returns the mean length of the prompts that the drafter's trainer has kept; 1 where there are none."""
    prompts = [num_prompt for rank in run.ranks for _, num_prompt in rank["drafter"].get("trajectories", [])]
    return round(statistics.mean(prompts)) if prompts else 1

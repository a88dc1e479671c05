"""Reads the measurements of a run, from which speed.py computes the steps of other configurations.

metrics.jsonl            seconds of its rollouts, and of the rest of its steps
responses/ (if kept)     lengths, problem by problem; else log-normal ones, as metrics.jsonl describes them
checkpoints/, by rank    the tuner's step costs and acceptance
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from tlt.config.schema import Config
from tlt.drafter.drafting.hybrid import drafter_kinds
from tlt.io.files import read_jsonl
from tlt.plan.speed import Assumed, Errors, Groups, log_normal, share, with_rest
from tlt.report.record import StepRecord, read_metrics
from tlt.speculative.strategy import BatchState, Strategy
from tlt.tuning.cost_model import CostModel
from tlt.tuning.tuner import default_arms
from tlt.types import UserError

ENOUGH_STEPS = 100
"""Engine steps without drafts that tell what those cost. From three, off came out four times too slow."""


@dataclass(frozen=True)
class RecordedRun:
    """The measurements of a run.

    ranks: the states of all ranks in the latest checkpoint.
    lengths: response lengths of the run's steps; empty: not kept.
    """

    config: Config
    steps: Sequence[StepRecord]
    ranks: Sequence[dict[str, Any]]
    lengths: Sequence[Groups]


def read_run(folder: Path, ranks: Sequence[Path]) -> RecordedRun:
    """Reads a run. Raises UserError for one that cannot be used.

    ranks: the ranks' files in its latest checkpoint; empty: there is none.
    """
    if not (file := folder / "config.json").is_file():
        what = "is no run's folder (it has no config.json)"
        raise UserError(f"--run: {folder} {what}; give the run.out_dir of a run")
    config = Config.from_json(file.read_text(encoding="utf-8"), str(file))
    steps = read_metrics(folder / "metrics.jsonl")
    if not steps or not ranks:
        lacks = "has no checkpoint" if steps else "has finished no step"
        raise UserError(f"--run: {folder} {lacks}, which costs are read from; give a run that has ended")
    states = [json.loads(path.read_text(encoding="utf-8")) for path in ranks]
    if not all(state["tuner"].get("costs", {}).get("num_steps") for state in states):
        remedy = "give a run with rollout.speculation adaptive and tuner cost-model"
        raise UserError(f"--run: {folder} has measured no step costs; {remedy}")
    files = sorted((folder / "responses").glob("rollout-*.jsonl"))
    return RecordedRun(config, steps, states, [read_lengths(file) for file in files])


def read_lengths(path: Path) -> Groups:
    """Returns the response lengths in a file of kept responses, by problem."""
    found: dict[str, list[int]] = {}
    for place, one in read_jsonl(path, "--run"):
        if not isinstance(one.get("problem_id"), str) or not isinstance(one.get("token_ids"), list):
            fault = "is no response with problem_id and token_ids"
            raise UserError(f"{place}: {fault}; repair the file, or remove it")
        found.setdefault(one["problem_id"], []).append(len(one["token_ids"]))
    return list(found.values())


class TunedPace:
    """The pace of replicas under the choices of a run's tuners, averaged over the tuners.

    Lengths are rounded to quarters of an octave, so that few predictions are made.
    """

    def __init__(self, models: Sequence[CostModel]) -> None:
        self.models = models
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def __call__(self, num: int, mean_length: float, may_draft: bool) -> float:
        key = num, round(4 * math.log2(max(mean_length, 1.0)))
        if key not in self._known:
            batch = BatchState(num, 2.0 ** (key[1] / 4), 0, 0)
            speeds = [{p.strategy: p.speed for p in model.decide(batch)[0]} for model in self.models]
            off, best = ([one[Strategy.OFF] for one in speeds], [max(one.values()) for one in speeds])
            self._known[key] = fmean(num / speed for speed in off), fmean(num / speed for speed in best)
        return self._known[key][may_draft]


def tuner_of(state: dict[str, Any], config: Config) -> CostModel:
    """Returns the tuner of a rank with the acceptance of the whole run in place of the latest."""
    model = CostModel(default_arms(drafter_kinds(config.drafter.path is not None)))
    acceptance = state["tuner"]["acceptance"]
    model.restore({**state["tuner"], "acceptance": {**acceptance, "latest": acceptance["lasting"]}})
    return model


def assume_recorded(run: RecordedRun, config: Config) -> Assumed:
    """Returns the assumptions about steps of this configuration, from the run's measurements."""
    cap, models = config.sampling.max_tokens, [tuner_of(state, run.config) for state in run.ranks]
    num_off = sum(model.costs.num_steps.get(Strategy.OFF, 0) for model in models)
    pace = TunedPace(models)
    errors = errors_of(beside(run, pace))
    of_off = Errors(errors.mean, min(errors.low, 1.0), errors.high)
    lengths, of_lengths = known_lengths(run)
    assumed = Assumed(
        steps=[[[min(length, cap) for length in group] for group in groups] for groups in lengths],
        pace=pace,
        num_samples=config.rollout.samples_per_problem,
        width=config.rollout.max_batch_size,
        off=of_off if num_off >= ENOUGH_STEPS else None,
        tlt=errors,
        other_seconds=0.0,
        lines=(
            of_lengths,
            f"costs and acceptance: as the {len(run.ranks)} tuner(s) of the run had measured them in"
            f" {len(run.steps)} steps; what it never ran is extrapolated; it has made {num_off:.0f} steps"
            f" without speculation, and with fewer than {ENOUGH_STEPS} nothing is said of off",
            f"rollouts take {errors.mean:.2f} times as long as that, as the run's did",
            f"the range: its steps took {errors.low:.2f} to {errors.high:.2f} times as long; of off some may"
            " take as long as the tuners say",
        ),
        source=f"{run.config.model.path.name}, as the run {run.config.run.out_dir} has recorded it",
        seed=config.run.seed,
    )
    return with_rest(assumed, fmean(step.step_seconds - step.rollout.seconds for step in run.steps))


def known_lengths(run: RecordedRun) -> tuple[Sequence[Groups], str]:
    """Returns the response lengths of a run's steps, and a line about them."""
    if run.lengths:
        return run.lengths, f"lengths: those of the {len(run.lengths)} steps that the run has kept"
    known = ((step.rollout.response_tokens, step.rollout.num_responses) for step in run.steps)
    line = "lengths: log-normal, with the median, p95 and largest of each step"
    line += "; run.keep_responses would have kept the very ones"
    return [[log_normal(of_step.p50, of_step.p95, of_step.max, num)] for of_step, num in known], line


def beside(run: RecordedRun, pace: TunedPace) -> list[tuple[float, float]]:
    """Returns the (measured, computed) seconds of a run's rollouts, without the first, of a fresh process, if
    there are others."""
    how = len(run.ranks), run.config.rollout.max_batch_size, pace, True
    computed = [share(list(chain(*groups)), *how).seconds for groups in known_lengths(run)[0]]
    pairs = [(step.rollout.seconds, seconds) for step, seconds in zip(run.steps, computed, strict=False)]
    return pairs[1:] or pairs


def errors_of(pairs: Sequence[tuple[float, float]]) -> Errors:
    """Returns the mean error of rollouts (measured, computed), and the range of nine out of ten."""
    low, high = np.quantile([measured / computed for measured, computed in pairs], [0.05, 0.95])
    return Errors(sum(one for one, _ in pairs) / sum(one for _, one in pairs), float(low), float(high))

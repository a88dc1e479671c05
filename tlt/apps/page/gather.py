"""Reads a run's records for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt.base.io.files import Record, parse_json, read_file
from tlt.base.records import NAN, TurnsRecord
from tlt.base.types import UserError
from tlt.training.report.outcome import Gain
from tlt.training.report.step_record import StepRecord, read_metrics
from tlt.training.report.versions import read_environments
from tlt.training.saved.evaluations import Evaluation, Evaluations, is_judged_by_reward

Values = NDArray[np.float64]

NO_VARIANCE_SHARE = "update/no_variance_share"
"""Derived: the share of an update's groups without variance."""
WAIT_SHARE = "rollout/turns/wait_share"
"""Derived: the share of the rollout in which a response waited for its environment, on average."""


@dataclass(frozen=True)
class RunRecords:
    """config: {}: no config.json.
    environments: versions, commit and machine of each attempt.
    """

    name: str
    folder: Path
    config: Record
    steps: list[StepRecord]
    evaluations: list[Evaluation]
    gain: Gain | None
    failures: list[str]
    environments: list[Record]

    @cached_property
    def x(self) -> Values:
        return np.array([record.step for record in self.steps], dtype=np.float64)

    @cached_property
    def _figures(self) -> list[dict[str, float]]:
        return [record.figures() for record in self.steps]

    @cached_property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for figures in self._figures for name in figures))

    def values(self, name: str) -> Values:
        """A figure of every step; NaN: missing."""
        if name == NO_VARIANCE_SHARE:
            return np.array([_no_variance_share(record) for record in self.steps], dtype=np.float64)
        if name == WAIT_SHARE:
            return np.array([_wait_share(record) for record in self.steps], dtype=np.float64)
        return np.array([figures.get(name, NAN) for figures in self._figures], dtype=np.float64)

    def group(self, prefix: str) -> dict[str, Values]:
        """prefix: such as rollout/strategy_seconds."""
        names = [name for name in self.names if name.startswith(f"{prefix}/")]
        return {name.removeprefix(f"{prefix}/"): self.values(name) for name in names}

    @property
    def has_turns(self) -> bool:
        return any(record.rollout.turns != TurnsRecord() for record in self.steps)

    def setting(self, place: str, default: object = None) -> object:
        section, _, key = place.partition(".")
        found = self.config.get(section)
        return found.get(key, default) if isinstance(found, dict) else default


def _no_variance_share(record: StepRecord) -> float:
    num_groups = record.rollout.groups_sampled - record.rollout.groups_discarded
    return record.update.zero_variance_groups / num_groups if num_groups > 0 else NAN


def _wait_share(record: StepRecord) -> float:
    rollout = record.rollout
    whole = rollout.num_responses * rollout.seconds
    return rollout.turns.wait_seconds / whole if whole > 0 else NAN


def read_run(folder: Path, name: str) -> RunRecords:
    """The run may still be writing."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise UserError(
            f"RUN: {folder} holds no metrics.jsonl; give the folder of a run, as run.out_dir names it"
        )
    config = _read_config(folder / "config.json")
    functions = config.get("rewards", {}).get("functions") or []
    if not isinstance(functions, list) or not all(isinstance(name, str) for name in functions):
        raise UserError(f"{folder / 'config.json'}: rewards.functions is no list of names; repair the file")
    evaluations = Evaluations(
        folder / "evaluations.jsonl", 1 << 62, writes=False, by_reward=is_judged_by_reward(functions)
    )
    failures = folder / "failures.log"
    lines = failures.read_bytes().decode("utf-8", "replace").splitlines() if failures.is_file() else []
    return RunRecords(
        name,
        folder,
        config,
        read_metrics(path),
        evaluations.all,
        evaluations.progress(),
        lines,
        read_environments(folder),
    )


def read_runs(folders: Sequence[Path]) -> list[RunRecords]:
    short = [folder.resolve().name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def _read_config(path: Path) -> Record:
    if not path.exists():
        return {}
    try:
        config = parse_json(read_file(path).decode())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); repair the file, or move it away") from None
    if not isinstance(config, dict) or not all(isinstance(section, dict) for section in config.values()):
        raise UserError(f"{path}: is no configuration of sections; repair the file, or move it away")
    return config


def is_known(values: Values) -> bool:
    return bool(np.isfinite(values).any())


def mean_of(values: Values) -> float:
    return float(np.nanmean(values)) if is_known(values) else math.nan

"""The record of a step, a line of metrics.jsonl. A quantity that does not exist is null in JSON and NaN in
the record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tlt.base.io.files import dumps, parse_json, read_appended, refuse_endless, write_atomically
from tlt.base.records import (
    NAN,
    DrafterCheck,
    IdleRecord,
    RewardSummary,
    RolloutRecord,
    SpeedupPair,
    UpdateMetrics,
)
from tlt.base.types import UserError
from tlt.base.value_types import describe_mistakes


@dataclass(frozen=True)
class StepRecord:
    """One RL step: a line of metrics.jsonl. Seconds are wall-clock unless said otherwise.

    step: counted from 1: step n makes the policy of n updates.
    policy_version: updates behind the policy that generated its responses, step - 1.
    step_seconds: duration of the whole step.
    cpu_seconds: processor time of all ranks.
    finished_at: Unix time.
    algorithm: its name.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int
    policy_version: int
    step_seconds: float
    cpu_seconds: float
    finished_at: float
    rollout: RolloutRecord
    rewards: RewardSummary
    update: UpdateMetrics
    drafter: DrafterCheck
    idle: IdleRecord
    algorithm: str
    speedup: SpeedupPair = field(default_factory=SpeedupPair)

    def to_json(self) -> str:
        return dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(line: str) -> StepRecord:
        """Raises ValueError that names the wrong fields."""
        values = parse_json(line)
        refuse_endless(values)
        try:
            record = _STEP_RECORD.validate_python(_nan_for_null(values))
        except ValidationError as error:
            raise ValueError(describe_mistakes(error)) from None
        if record.step < 0 or not record.step_seconds >= 0 or not 0 <= record.finished_at < _YEAR_10_000:
            raise ValueError("step, step_seconds or finished_at: no number of a step, seconds or time")
        return record

    def figures(self) -> dict[str, float]:
        """Finite numbers by path: rollout/response_tokens/p95. Items of a list count from 1:
        idle/preemption_seconds_1."""
        left_out = {"step", "finished_at"} | ({"speedup"} if not self.speedup.num_tokens else set())
        return dict(_numbers("", {k: value for k, value in vars(self).items() if k not in left_out}))


_STEP_RECORD = TypeAdapter(StepRecord)
_YEAR_10_000 = 253_402_300_800
"""Unix time at which years have five digits."""


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        for key, item in (value if isinstance(value, Mapping) else vars(value)).items():
            yield from _numbers(f"{name}/{key}" if name else key, item)
    elif isinstance(value, tuple):
        for number, item in enumerate(value, start=1):
            yield from _numbers(f"{name}_{number}", item)
    elif isinstance(value, int | float) and math.isfinite(value):
        yield name, value


def _nan_for_null(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, item in items:
        value[place] = _nan_for_null(item)
    return NAN if value is None else value


class MetricsWriter:
    """Flushes every line. Opening drops lines after step `last_kept`."""

    def __init__(self, path: str | Path, last_kept: int) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in _read_records(self.path) if record.step <= last_kept]
        with write_atomically(self.path) as file:
            file.writelines(record.to_json() + "\n" for record in kept)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        self._last_step = last_kept

    def write(self, record: StepRecord) -> None:
        assert record.step > self._last_step, f"step {record.step} after step {self._last_step}"
        self._last_step = record.step
        self._file.write(record.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[StepRecord]:
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file; give the metrics.jsonl of a run")
    return _read_records(path)


def _read_records(path: Path) -> list[StepRecord]:
    return read_appended(path, StepRecord.from_json, "step record")

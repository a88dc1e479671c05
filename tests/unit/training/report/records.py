"""A step's record for tests, in which every field has a value."""

import dataclasses
from typing import Any, get_type_hints

from tlt.base.records import LengthStats, TurnsRecord
from tlt.training.report.step_record import StepRecord

PARTS = {name: kind for name, kind in get_type_hints(StepRecord).items() if dataclasses.is_dataclass(kind)}


def record(step: int, **changes: Any) -> StepRecord:
    """A record in which every field says something. changes: of its own fields, and by part: {field:
    value}."""
    given: dict[str, dict[str, object]] = {
        "rollout": {
            "response_tokens": LengthStats.of([5, 9, 700]),
            "strategy_seconds": {"off": 1.5},
            "strategy_speed": {"off": 200.0},
            "draft_acceptance_rate_pos": (0.8, 0.5),
            "followed_by_age": {"1": 40},
            "turns": TurnsRecord(2.5, 100, 7, 2, 1, 3.5, 0.25, 60, 1.5, 2.5),
        },
        "rewards": {
            "parts": {"task": 0.5, "brief": -0.5},
            "metrics": {},
            "reward_by_task": {"sums": 0.5},
            "solve_rate_by_task": {"sums": 0.25},
        },
        "update": {},
        "speedup": {},
        "drafter": {"version": step},
        "idle": {
            "preemption_seconds": (0.01, 0.002),
            "seconds_by_use": {"rest": 0.5},
            "gain": {},
            "cost": {"train": 0.1},
        },
    }
    parts = {
        name: kind(**{**plain(kind), **given[name], **changes.pop(name, {})}) for name, kind in PARTS.items()
    }
    return StepRecord(**{**plain(StepRecord), "step": step, "policy_version": step - 1, **parts, **changes})


def plain(kind: type) -> dict[str, object]:
    return {
        field.name: {"int": 3, "str": "off", "bool": False}.get(field.type, 0.5)
        for field in dataclasses.fields(kind)
    }

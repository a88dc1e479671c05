"""Judges whether a run fits its devices.

plan ─ fits? ─ yes ─▶ verdict
               no ──▶ change one key, plan again … until it fits
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError

from tlt.apps.plan.memory import plan_memory, slot_bytes
from tlt.apps.plan.sizes import GIB, PlannedRun
from tlt.base.config.schema import Config
from tlt.base.types import UserError
from tlt.training.launch.place import find_place


@dataclass(frozen=True)
class FitVerdict:
    """fits: None: the device's memory is unknown."""

    fits: bool | None
    line: str


def fits(run: PlannedRun) -> bool:
    """Whether a run fits, if need be with caches for a single response."""
    if lacks_room(run):
        return False
    return run.rank_bytes is None or plan_memory(run).needed <= run.rank_bytes


def lacks_room(run: PlannedRun) -> bool:
    given = run.config.rollout.kv_gib
    return given is not None and slot_bytes(run, run.longest) > given * GIB


def judge(run: PlannedRun) -> FitVerdict:
    if lacks_room(run):
        return FitVerdict(False, _describe_room(run))
    plan, available = plan_memory(run), run.rank_bytes
    phase, peak = plan.peak
    most = f"{peak / GIB:.1f} GiB in the phase {phase}"
    if available is None:
        return FitVerdict(None, f"at most {most}; give --device-gib to hear whether it fits")
    where = f"of {available / GIB:.1f} GiB that a {'GPU' if run.is_gpu else 'rank'} has"
    needed = f"{plan.needed / GIB:.1f} GiB {where} are needed"
    if peak <= available:
        return FitVerdict(True, f"fits: {most} {where}")
    if plan.needed <= available:
        return FitVerdict(
            True, f"fits: {needed}; the caches get what is left, and some responses are read again"
        )
    return FitVerdict(False, f"does not fit: {needed}, most of them in the phase {phase}; {_remedy(run)}")


def refuse(run: PlannedRun) -> None:
    if lacks_room(run):
        raise UserError(judge(run).line)
    if not fits(run):
        raise UserError(f"memory: {judge(run).line} (tlt plan memory shows the parts)")


def _describe_room(run: PlannedRun) -> str:
    least = math.ceil(slot_bytes(run, run.longest) / GIB * 1000) / 1000
    is_enough = fits(run.changed({"rollout.kv_gib": least}))
    remedy = f"give at least {least:.3f}, or lower sampling.max_tokens" if is_enough else _remedy(run)
    return (
        f"rollout.kv_gib: {run.config.rollout.kv_gib:g} GiB do not hold one response of {run.longest} tokens "
        f"with its prompt; {remedy}"
    )


def _remedy(run: PlannedRun) -> str:
    """One change if it suffices, else several, else more GPUs or machines."""
    changes, tokens = _changes(run), run.config.sampling.max_tokens
    shorter = [_shortened(run, tokens // n) for n in (2, 4, 8, 16) if tokens >= n]
    together = [functools.reduce(operator.or_, changes[: i + 1]) for i in range(len(changes))]
    every: dict[str, Any] = functools.reduce(operator.or_, changes, {})
    shortened = [every | change for change in shorter]
    for change in (*changes, *shorter, *together, *shortened):
        if _is_remedy(run, change):
            return f"set {_written(change)}"
    least = shortened[-1] if shortened else every
    here = {} if run.is_gpu or find_place() is not None else {"run.num_ranks": run.num_sharing}
    for change, factor in itertools.product((every | here, least | here), (2, 4, 8, 16, 32)):
        for wider in (change, change | {"parallel.policy": "fsdp"}):
            if _is_remedy(more := replace(run, num_ranks=run.num_ranks * factor), wider):
                return _with_ranks(more, wider)
    return "no key makes it fit: take a smaller model or larger devices"


def _is_remedy(run: PlannedRun, change: dict[str, Any]) -> bool:
    if not fits(changed := run.changed(change)):
        return False
    try:
        Config.model_validate(changed.config.model_dump())
    except ValidationError:
        return False
    return True


def _with_ranks(run: PlannedRun, change: dict[str, Any]) -> str:
    where = "as many GPUs" if run.is_gpu else f"{run.num_ranks // run.num_sharing} machines like this one"
    keys = f"set {_written(change)}, and take" if change else "take"
    return f"{keys} {run.num_ranks} ranks on {where} (tlt plan memory --ranks {run.num_ranks})"


def _changes(run: PlannedRun) -> list[dict[str, Any]]:
    """Changes that leave the results equal come first."""
    config, longest = run.config, run.longest
    parallel, lora = config.parallel, config.lora
    changes: list[dict[str, Any]] = []
    # A smaller number type lets "auto" take more ranks.
    pinned = {"run.num_ranks": run.num_sharing} if _has_auto_ranks(run) else {}
    if run.num_ranks > 1 and not run.is_sharded:
        changes.append({"parallel.policy": "fsdp"})
    if not parallel.checkpoint_activations and run.model.num_layers > 1:
        changes.append({"parallel.checkpoint_activations": True})
    if config.algorithm.tokens_per_micro_batch > longest:
        changes.append({"algorithm.tokens_per_micro_batch": longest})
    if config.rollout.kv_gib is not None:
        changes.append({"rollout.kv_gib": None})
    if run.engine_dtype == torch.float32:
        changes.append({"run.dtype": "bfloat16"} | pinned)
    if lora.is_used and lora.base_dtype is None and config.run.dtype != "float64":
        changes.append({"lora.base_dtype": "bfloat16"} | pinned)
    if run.num_ranks > 1 and parallel.param_dtype is None:
        changes.append({"parallel.policy": "fsdp", "parallel.param_dtype": "bfloat16"})
    if run.num_sharing > 1 and run.num_sharing == run.num_ranks and find_place() is None:
        halves = (run.num_ranks // 2**i for i in range(1, run.num_ranks.bit_length()))
        changes += [{"run.num_ranks": num} for num in halves]
    return changes


def _has_auto_ranks(run: PlannedRun) -> bool:
    return run.config.run.num_ranks == "auto" and not run.is_gpu and find_place() is None


def _shortened(run: PlannedRun, max_tokens: int) -> dict[str, Any]:
    algorithm, before = run.config.algorithm, run.config.sampling.max_tokens
    tokens = min(algorithm.tokens_per_micro_batch, max_tokens + run.longest_prompt)
    changes = {"sampling.max_tokens": max_tokens, "algorithm.tokens_per_micro_batch": tokens}
    if (buffer := algorithm.overlong_buffer_tokens or 0) > max_tokens:
        changes["algorithm.overlong_buffer_tokens"] = buffer * max_tokens // before
    return changes


def _written(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {_as_toml(value)}" for key, value in changes.items())


def _as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)

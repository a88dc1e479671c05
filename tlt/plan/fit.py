"""Judges whether a run fits its devices, and if not, searches for a change of the configuration that does.

plan ─ fits? ─ yes ─▶ verdict
               no ──▶ change one key, plan again … until it fits
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tlt.plan.memory import plan_memory, slot_bytes
from tlt.plan.sizes import GIB, PlannedRun
from tlt.types import UserError


@dataclass(frozen=True)
class FitVerdict:
    """Whether a run fits; None: the device's memory is unknown. `line` is for people."""

    fits: bool | None
    line: str


def fits(run: PlannedRun) -> bool:
    """Returns whether the run fits, if need be with caches for a single response."""
    return run.rank_bytes is None or plan_memory(run).needed <= run.rank_bytes


def judge(run: PlannedRun) -> FitVerdict:
    """Returns whether the run fits, and the remedy if not."""
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
    """Raises UserError for a run that cannot fit."""
    given, needed = run.config.rollout.kv_gib, slot_bytes(run, run.longest)
    if given is not None and needed > given * GIB:
        raise UserError(
            f"rollout.kv_gib: {given:g} GiB do not hold one response of {run.longest} tokens with its prompt;"
            f" give at least {needed / GIB + 5e-4:.3f}, or lower sampling.max_tokens"
        )
    if not fits(run):
        raise UserError(f"memory: {judge(run).line} (tlt plan memory shows the parts)")


def _remedy(run: PlannedRun) -> str:
    """Returns the keys to change and their values: one change if it suffices, else several together."""
    changes, tokens = _changes(run), run.config.sampling.max_tokens
    shorter = [_shortened(run, tokens // n) for n in (2, 4, 8, 16) if tokens >= n]
    together = [functools.reduce(operator.or_, changes[: i + 1]) for i in range(len(changes))]
    for change in (*changes, *shorter, *together):
        if fits(run.changed(change)):
            return f"set {_written(change)}"
    every = together[-1] if together else {}
    sharded = run.changed(every | {"parallel.policy": "fsdp"})
    for num in (run.num_ranks * factor for factor in (2, 4, 8, 16, 32)):
        if fits(replace(sharded, num_ranks=num)):
            return f"set {_written(every)} and {num} ranks would do" if every else f"{num} ranks would do"
    return "no key makes it fit: take a smaller model or larger devices"


def _changes(run: PlannedRun) -> list[dict[str, Any]]:
    """Returns changes that save memory, those first that change neither results nor responses."""
    config, longest = run.config, run.longest
    parallel, lora = config.parallel, config.lora
    changes: list[dict[str, Any]] = []
    if run.num_ranks > 1 and not run.is_sharded:
        changes.append({"parallel.policy": "fsdp"})
    if not parallel.checkpoint_activations:
        changes.append({"parallel.checkpoint_activations": True})
    if config.algorithm.tokens_per_micro_batch > longest:
        changes.append({"algorithm.tokens_per_micro_batch": longest})
    if config.rollout.kv_gib is not None:
        changes.append({"rollout.kv_gib": None})
    if run.engine_dtype == torch.float32:
        changes.append({"run.dtype": "bfloat16"})
    if lora.rank and lora.base_dtype is None and config.run.dtype != "float64":
        changes.append({"lora.base_dtype": "bfloat16"})
    if run.num_ranks > 1 and parallel.param_dtype is None:
        changes.append({"parallel.policy": "fsdp", "parallel.param_dtype": "bfloat16"})
    return changes


def _shortened(run: PlannedRun, max_tokens: int) -> dict[str, Any]:
    tokens = min(run.config.algorithm.tokens_per_micro_batch, max_tokens + run.longest_prompt)
    return {"sampling.max_tokens": max_tokens, "algorithm.tokens_per_micro_batch": tokens}


def _written(changes: dict[str, Any]) -> str:
    shown = {None: "none", True: "true"}
    return ", ".join(f"{key} = {shown.get(value, value)}" for key, value in changes.items())

"""Whether a run fits its devices, and if not, which key to change to what: changes are tried on the configuration. Knows no
formula.

plan ─ fits? ─ yes ─▶ verdict
               no ──▶ change one key, plan again … until it fits ─▶ verdict with these keys, or with what does not exist yet
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tlt.config.schema import Config
from tlt.distributed.sharding import choose_layout
from tlt.drafter.model import DrafterShape
from tlt.models.decoder import ModelConfig
from tlt.plan.memory import MemoryPlan, activations_per_token, plan_memory, slot_bytes
from tlt.plan.subject import Place, Subject
from tlt.types import UserError

GIB = 2**30


@dataclass(frozen=True)
class Verdict:
    """fits: None: the device's memory is unknown.  line: for people.  missing: what does not exist yet and would be needed."""

    fits: bool | None
    line: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """A run as a plan sees it. machine: of its ranks and devices; whether it is sharded follows from the configuration."""

    config: Config
    model: ModelConfig
    drafter: DrafterShape | None
    machine: Place

    @property
    def place(self) -> Place:
        wanted = self.config.parallel.policy
        layout = choose_layout(wanted, self.machine.num_ranks, "cuda" if self.machine.is_gpu else "cpu")
        return replace(self.machine, is_sharded=layout.is_sharded)

    def plan(self) -> MemoryPlan:
        return plan_memory(self.config, self.model, self.drafter, self.place)

    @property
    def fits(self) -> bool:
        """Whether it can run: with caches for a single response, if need be."""
        available = self.place.rank_bytes
        return available is None or self.plan().needed <= available

    def changed(self, changes: dict[str, Any]) -> Run:
        """Returns the run with other values, by key."""
        config = self.config
        for key, value in changes.items():
            section, name = key.split(".")
            part = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: part})
        return replace(self, config=config)


def judge(run: Run) -> Verdict:
    """Returns whether the run fits, and the remedy where it does not."""
    plan, available = run.plan(), run.place.rank_bytes
    phase, peak = plan.peak
    most = f"{peak / GIB:.1f} GiB in the phase {phase}"
    if available is None:
        return Verdict(None, f"at most {most}; give --device-gib to hear whether it fits")
    where = f"of {available / GIB:.1f} GiB that a {'GPU' if run.place.is_gpu else 'rank'} has"
    missing = tuple(_missing(run, available))
    if run.fits and peak <= available:
        return Verdict(True, f"fits: {most} {where}", missing)
    if run.fits:
        needed = f"{plan.needed / GIB:.1f} GiB {where} are needed"
        return Verdict(True, f"fits: {needed}; the caches get what is left, and some responses are read again", missing)
    line = f"does not fit: {plan.needed / GIB:.1f} GiB {where} are needed, {_phase_needed(plan)}; {remedy(run)}"
    return Verdict(False, line, missing)


def refuse(run: Run) -> None:
    """Raises UserError for a run that cannot fit."""
    if (given := run.config.rollout.kv_gib) is not None:
        subject = Subject(run.config, run.model, run.drafter, run.place)
        needed = slot_bytes(subject, subject.longest)
        if needed > given * GIB:
            raise UserError(
                f"rollout.kv_gib: {given:g} GiB do not hold one response of {subject.longest} tokens with its prompt;"
                f" give at least {needed / GIB + 5e-4:.3f}, or lower sampling.max_tokens"
            )
    if not run.fits:
        raise UserError(f"memory: {judge(run).line} (tlt plan memory shows the parts)")


def remedy(run: Run) -> str:
    """Returns the keys to change, and their values: one that suffices alone, else several together."""
    changes = list(_changes(run))
    for change in changes:
        if run.changed(change).fits:
            return _written(change)
    together: dict[str, Any] = {}
    for change in changes:
        together |= change
        if run.changed(together).fits:
            return _written(together)
    num = run.place.num_ranks
    for factor in (2, 4, 8, 16, 32):
        larger = replace(
            run.changed(together | {"parallel.policy": "fsdp"}), machine=replace(run.machine, num_ranks=num * factor)
        )
        if larger.fits:
            return f"{_written(together)} and {num * factor} ranks would do" if together else f"{num * factor} ranks would do"
    return "no key makes it fit: take a smaller model or larger devices"


def _changes(run: Run) -> Iterator[dict[str, Any]]:
    """Yields changes that save memory, those first that change neither results nor responses."""
    config, place = run.config, run.place
    if place.num_ranks > 1 and not place.is_sharded:
        yield {"parallel.policy": "fsdp"}
    if not config.parallel.checkpoint_activations:
        yield {"parallel.checkpoint_activations": True}
    longest = Subject(config, run.model, run.drafter, place).longest
    if config.algorithm.tokens_per_micro_batch > longest:
        yield {"algorithm.tokens_per_micro_batch": longest}
    if config.rollout.kv_gib is not None:
        yield {"rollout.kv_gib": None}
    if config.run.dtype == "float32":
        yield {"run.dtype": "bfloat16"}
    if config.lora.rank and config.lora.base_dtype is None and config.run.dtype != "float64":
        yield {"lora.base_dtype": "bfloat16"}
    if place.num_ranks > 1 and config.parallel.param_dtype is None:
        yield {"parallel.policy": "fsdp", "parallel.param_dtype": "bfloat16"}
    for divisor in (2, 4, 8, 16):
        shorter = config.sampling.max_tokens // divisor
        micro_batch = min(config.algorithm.tokens_per_micro_batch, shorter + place.longest_prompt)
        change = {"sampling.max_tokens": shorter, "algorithm.tokens_per_micro_batch": micro_batch}
        if shorter and run.changed(change).fits:
            yield change
            return


def _written(changes: dict[str, Any]) -> str:
    shown = {None: "none", True: "true"}
    return "set " + ", ".join(f"{key} = {shown.get(value, value)}" for key, value in changes.items())


def _phase_needed(plan: MemoryPlan) -> str:
    return f"most of them in the phase {plan.peak[0]}"


def _missing(run: Run, available: int) -> Iterator[str]:
    """Yields what this run would want and nobody has built yet."""
    place, plan = run.place, run.plan()
    engine = next(part.num_bytes for part in plan.parts if part.name == "engine")
    if place.num_ranks > 1 and engine > available / 2 and run.config.rollout.engine == "tlt":
        yield (
            f"the engine holds the whole model on every rank, {engine / GIB:.1f} GiB, also during the update; tensor-parallel"
            " generation, which would cut it over several, does not exist yet"
        )
    subject = Subject(run.config, run.model, run.drafter, place)
    layer = subject.longest * activations_per_token(run.model) * subject.computed
    kept = layer + subject.longest * run.model.num_layers * run.model.hidden_size * subject.computed
    if kept > available / 3:
        yield (
            f"one response of {subject.longest} tokens takes {kept / GIB:.1f} GiB in the update, though only the inputs of its"
            " layers are kept; neither sequence parallelism nor offload exists yet"
        )

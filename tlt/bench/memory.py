"""Refuses engines and runs that have no room side by side; plan.memory gives the sizes of one.

engines    process + one copy of the weights + for each a drafter and caches for one response
runs       process + what each always holds + the most that one of them takes at a time
"""

from __future__ import annotations

from tlt.assembly.model import drafter_folder, model_folder
from tlt.assembly.ranks import local_ranks
from tlt.config.schema import Config
from tlt.drafter.formats.folder import load_shape
from tlt.hf.config import load_model_config
from tlt.plan.memory import ALWAYS, MemoryPlan, plan_memory
from tlt.plan.sizes import GIB, PlannedRun
from tlt.training.problems import load_problems
from tlt.training.start import plan_run
from tlt.types import UserError

PROCESS, ENGINE, DRAFTER = "process", "engine", "drafter"


def plan_subject(config: Config) -> PlannedRun:
    """Returns the run that the memory plan of a configuration is about."""
    model, folder = load_model_config(model_folder(config)), drafter_folder(config)
    drafter = None if folder is None else load_shape(folder, model)
    longest_prompt = max(len(problem.prompt_ids) for problem in load_problems(config, "train"))
    return plan_run(config, model, drafter, longest_prompt)


def refuse_engines(run: PlannedRun, num_engines: int) -> None:
    """Raises UserError where `num_engines` of our engines, which share weights, do not fit on one device."""
    needed = engines_bytes(plan_memory(run), num_engines)
    num_sharing = 1 if run.is_gpu else local_ranks(run.config)
    if run.rank_bytes is not None and needed > (available := run.rank_bytes * num_sharing):
        sizes = f"{needed / GIB:.1f} GiB of {available / GIB:.1f}"
        remedy = "set run.dtype to bfloat16, lower sampling.max_tokens, or take a smaller model"
        raise UserError(f"memory: {num_engines} engines, which share the weights, take {sizes}; {remedy}")


def refuse_runs(run: PlannedRun, num_runs: int) -> None:
    """Raises UserError where `num_runs` of these runs do not fit in a rank."""
    available, needed = run.rank_bytes, runs_bytes(plan_memory(run), num_runs)
    if available is not None and needed > available:
        sizes = f"{needed / GIB:.1f} GiB of {available / GIB:.1f} that a rank has"
        remedy = "lower algorithm.tokens_per_micro_batch or run.num_ranks, or set lora.rank"
        raise UserError(f"memory: {num_runs} runs side by side take {sizes}; compare fewer, {remedy}")


def engines_bytes(plan: MemoryPlan, num_engines: int) -> int:
    """Returns the bytes that the engines take together, with the least caches and one at work at a time."""
    standing = _standing(plan)
    passing = sum(term.num_bytes for term in plan.terms if term.phases == ("rollout",))
    each = standing.get(DRAFTER, 0) + plan.least
    return standing[PROCESS] + standing[ENGINE] + num_engines * each + passing


def runs_bytes(plan: MemoryPlan, num_runs: int) -> int:
    """Returns the bytes that the runs take together, with one at work at a time."""
    standing = _standing(plan)
    return plan.needed + (num_runs - 1) * (sum(standing.values()) - standing[PROCESS])


def _standing(plan: MemoryPlan) -> dict[str, int]:
    """Returns the bytes of the permanent terms, by name."""
    return {term.name: term.num_bytes for term in plan.terms if term.phases == ALWAYS}

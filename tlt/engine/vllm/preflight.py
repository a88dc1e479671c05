"""Refuses vLLM engines that could not work, before one is started."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from tlt.base.config.vllm import VllmSection
from tlt.base.speculation import Speculation
from tlt.base.types import UserError
from tlt.engine.vllm.inside.release import check_installed
from tlt.engine.vllm.strategies import check_speculation
from tlt.engine.vllm.transfer import choose_way

VLLM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM's own mode in which a row's bits do not depend on its batch."""
LEAST_CAPABILITY = (8, 0)


def check_invariant(device: str) -> None:
    """Raises UserError. device: "cpu" or "cuda"."""
    remedy = "give false, or rollout.engine tlt"
    if device == "cpu":
        raise UserError(f"run.equal_rows: vLLM has no batch-invariant mode on a CPU; {remedy}")
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        found, needed = (".".join(map(str, one)) for one in (capability, LEAST_CAPABILITY))
        raise UserError(
            f"run.equal_rows: vLLM's batch-invariant mode needs compute capability {needed}, this GPU has "
            f"{found}; {remedy}"
        )
    spec = find_spec("vllm")
    assert spec is not None, "check_installed has found it"
    known = "" if spec.origin is None else Path(spec.origin).with_name("envs.py").read_text(encoding="utf-8")
    if INVARIANT not in known:
        raise UserError(f"run.equal_rows: this vLLM does not know {INVARIANT}; {remedy}")


def check_vllm(
    speculation: Speculation,
    has_learned: bool,
    dtype: torch.dtype,
    device: str,
    section: VllmSection,
    num_engines: int = 1,
    is_in_group: bool = False,
    *,
    equal_rows: bool = False,
) -> None:
    """Raises UserError.

    device: "cpu" or "cuda".
    num_engines: on this machine.
    is_in_group: a process group exists, so that vLLM's worker needs its own process.
    """
    check_installed()
    check_speculation(speculation, has_learned)
    if equal_rows:
        check_invariant(device)
    if dtype not in VLLM_DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise UserError(
            f"dtype: {name}, which vLLM does not compute in; give float32 or bfloat16, or engine tlt"
        )
    num_gpus = torch.cuda.device_count()
    if device == "cpu" and num_gpus:
        raise UserError("device: cpu, but vLLM computes on this machine's GPUs; give cuda, or engine tlt")
    has_own_worker = section.tensor_parallel > 1 or is_in_group
    choose_way(section, is_cuda=device == "cuda", has_own_worker=has_own_worker)
    needed = section.tensor_parallel * num_engines
    if device == "cuda" and needed > num_gpus:
        each = f"{num_engines} engine(s) of {section.tensor_parallel} GPU(s) each need {needed}"
        raise UserError(
            f"vllm.tensor_parallel: {each}, and this machine has {num_gpus}; give "
            f"{max(num_gpus // num_engines, 1)}"
        )

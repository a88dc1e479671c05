"""Refuses vLLM engines that could not work, before one is started."""

from __future__ import annotations

import torch

from tlt.base.config.vllm import VllmSection
from tlt.base.speculation import Speculation
from tlt.base.types import UserError
from tlt.engine.vllm.inside.release import check_installed
from tlt.engine.vllm.strategies import check_speculation
from tlt.engine.vllm.transfer import choose_way

VLLM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_vllm(
    speculation: Speculation,
    has_learned: bool,
    dtype: torch.dtype,
    device: str,
    section: VllmSection,
    num_engines: int = 1,
    is_in_group: bool = False,
) -> None:
    """Raises UserError.

    device: "cpu" or "cuda".
    num_engines: on this machine.
    is_in_group: a process group exists, so that vLLM's worker needs its own process.
    """
    check_installed()
    check_speculation(speculation, has_learned)
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

"""What can be refused of an engine that is vLLM before one is started. Starts nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tlt.types import UserError
from tlt.vllm.link import VllmSettings, check_installed
from tlt.vllm.strategies import check_speculation

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_vllm(
    speculation: str, has_learned: bool, dtype: torch.dtype, device: str, tensor_parallel: int, num_engines: int = 1
) -> None:
    """Raises UserError for an engine that could not be had. device: "cpu" or "cuda".  num_engines: on this machine."""
    check_installed()
    check_speculation(speculation, has_learned)
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise UserError(f"dtype: {name}, which vLLM does not compute in; give float32 or bfloat16, or engine tlt")
    num_gpus = torch.cuda.device_count()
    if device == "cpu" and num_gpus:
        raise UserError("device: cpu, but vLLM computes on this machine's GPUs; give cuda, or engine tlt")
    needed = tensor_parallel * num_engines
    if device == "cuda" and needed > num_gpus:
        each = f"{num_engines} engine(s) of {tensor_parallel} GPU(s) each need {needed}"
        raise UserError(
            f"vllm.tensor_parallel: {each}, and this machine has {num_gpus}; give {max(num_gpus // num_engines, 1)}"
        )


def refused(error: Exception, settings: VllmSettings) -> UserError:
    """Returns the error of a vLLM that would not start, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = next((line for line in lines if "Value error," in line), lines[0]).removeprefix("Value error, ")
    if "KV cache" in said and settings.kv_gib is not None:
        wanted = _wanted_gib(said)
        remedy = "give more" if wanted is None else f"give at least {wanted:g}"
        return UserError(
            f"kv_gib: {settings.kv_gib:g} GiB do not hold one sequence of {settings.window} tokens in vLLM; "
            f"{remedy}, or fewer max_tokens"
        )
    return UserError(f"engine: vllm does not start with these settings: {said}; change them, or use engine tlt")


def _wanted_gib(said: str) -> float | None:
    """Returns the memory that vLLM's message asks for, rounded up so that it suffices."""
    words: Sequence[str] = said.replace("(", " ").replace(",", " ").split()
    found = next((words[i - 1] for i, word in enumerate(words) if word == "GiB"), None)
    try:
        return None if found is None else round(float(found) + 0.01, 2)
    except ValueError:
        return None

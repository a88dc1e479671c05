"""Starts vLLM with the law inside. Imports vLLM, so link.py imports it late."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from vllm.sampling_params import RequestOutputKind

from tlt.base.io.text import one_line
from tlt.base.types import UserError
from tlt.engine.memory import GPU_SHARE
from tlt.engine.vllm.inside.admission import CONFIG_KEY
from tlt.engine.vllm.inside.plugin import register
from tlt.engine.vllm.inside.scheduler import LengthScheduler
from tlt.engine.vllm.settings import CPU_KV_GIB, VllmSettings, speculative_config

MakeParams = Callable[[int, list[int], dict[str, Any]], vllm.SamplingParams]


def start(settings: VllmSettings) -> tuple[vllm.LLM, MakeParams]:
    register()
    # a reload warns of every layer without weights of its own; tlt_settle (worker.py) checks for itself
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    with _as_launched(), torch.random.fork_rng():  # the caller's random numbers stay as they are
        try:
            llm = vllm.LLM(**arguments(settings))
        except ValueError as error:  # vLLM refuses the model, or a cache without room for a whole response
            remedy = "change [vllm], rollout.kv_gib or the model, or use engine tlt"
            raise UserError(f"engine: vllm does not start ({one_line(error, 400)}); {remedy}") from None
        except RuntimeError as error:  # an attention without the mode; a worker process tells only its log
            if "batch_invariant" not in str(error):
                raise
            raise UserError(
                f"run.equal_rows: {one_line(error, 400)}; give false, or rollout.engine tlt"
            ) from None
    return llm, request_params


@contextmanager
def _as_launched() -> Iterator[None]:
    """vLLM's CPU platform writes its own ranks over the launcher's, which a run reads again (place.py)."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    try:
        yield
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before


def arguments(settings: VllmSettings) -> dict[str, Any]:
    is_cuda = torch.cuda.is_available()
    asked = settings.asked
    kv_gib = asked.kv_gib if asked.kv_gib is not None or is_cuda else CPU_KV_GIB
    return {
        "model": str(settings.model),
        "dtype": str(asked.dtype).removeprefix("torch."),
        "max_model_len": settings.window,
        # our engine never sends more than max_batch_size, but vLLM captures graphs for the draft lengths that
        # its table names up to this size, one length a size
        "max_num_seqs": max(asked.max_batch_size, len(settings.depths)),
        "tensor_parallel_size": asked.vllm.tensor_parallel,
        **(gpu_arguments(settings) if is_cuda else {}),
        "distributed_executor_backend": "uni" if settings.is_in_process else "mp",
        "kv_cache_memory_bytes": None if kv_gib is None else int(kv_gib * 2**30),
        "enforce_eager": not asked.vllm.compile,
        "enable_prefix_caching": asked.vllm.prefix_caching,
        "enable_sleep_mode": is_cuda,
        "speculative_config": speculative_config(settings.drafter, settings.depths),
        "additional_config": {CONFIG_KEY: {"tau": settings.tau, "captures": settings.captures}},
        "weight_transfer_config": {"backend": "ipc"} if settings.way == "ipc" else None,
        "worker_extension_cls": "tlt.engine.vllm.inside.worker.TltWorker",
        "scheduler_cls": LengthScheduler,
        "async_scheduling": False,
        "logprobs_mode": "processed_logits",
        "generation_config": "vllm",  # no top-k or other defaults of the checkpoint
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "seed": 0,
    }


def gpu_arguments(settings: VllmSettings) -> dict[str, Any]:
    """vLLM's own share, nine tenths of all memory, ignores the trained policy."""
    size = settings.asked.vllm.tensor_parallel
    first = settings.device_index * size
    free, total = torch.cuda.mem_get_info(first)
    share = {"gpu_memory_utilization": GPU_SHARE * free / total}
    return share if first == 0 else {**share, "device_ids": list(range(first, first + size))}


def request_params(max_tokens: int, stop_ids: list[int], extra_args: dict[str, Any]) -> vllm.SamplingParams:
    """The law is in `extra_args`; vLLM itself decodes greedily, at the least cost."""
    return vllm.SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        stop_token_ids=stop_ids,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra_args,
    )

"""Our end of vLLM: it is started with the law inside, and driven step by step in this process. Knows no
responses, only requests by name and their new tokens; weights.py brings weights in.

    in this process      scheduler and, for one device, the worker
    else                 a worker process for every device
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tlt.io.processes import how_it_ended
from tlt.vllm.inside.release import check_installed
from tlt.vllm.settings import VllmSettings
from tlt.vllm.transfer import make_carrier
from tlt.vllm.weights import Weights

_ENVIRONMENT = {
    # the scheduler in this process: draft lengths are set before every step
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # torch.set_num_threads has the say
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # what a command prints is its result
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def needs_own_process() -> bool:
    """Returns whether vLLM's worker cannot be in this process: it has a process group already, or has
    loaded numba (as vLLM's n-gram drafter does), whose objects vLLM trips over when it looks for its
    kernels."""
    return torch.distributed.is_initialized() or "llvmlite" in sys.modules


class Link:
    """Holds a running vLLM."""

    def __init__(self, settings: VllmSettings) -> None:
        check_installed()
        self.settings, self.dtype, self.max_depth = settings, settings.dtype, settings.max_depth
        self._num_threads = torch.get_num_threads()
        way = settings.way
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        quieten()
        from tlt.vllm.start import start  # imports vllm, which reads the environment

        with nullcontext() if settings.is_in_process else workers_deaf_to_interrupts():
            self._llm, self._sampling_params = start(settings)
        engine = self._llm.llm_engine
        self._engine, self._scheduler = engine, engine.engine_core.engine_core.scheduler
        self.device = torch.device(engine.vllm_config.device_config.device_type)
        self.is_v2 = bool(engine.vllm_config.use_v2_model_runner)
        if not settings.is_in_process:
            self.call("tlt_hear_termination")
        carrier = make_carrier(way, self.call, torch.device(self.device.type, settings.device_index))
        self.weights = Weights(self._llm, self.call, carrier)

    @property
    def captures(self) -> bool:
        return self.settings.captures and self.settings.is_in_process and not self.is_v2

    @property
    def sleeps(self) -> bool:
        return self.device.type == "cuda"

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────

    def add(
        self,
        name: str,
        token_ids: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
        extra_args: dict[str, Any],
    ) -> str:
        """Sends a request, which goes on from its tokens; returns vLLM's own name for it."""
        params = self._sampling_params(max_tokens, list(stop_ids), extra_args)
        internal: str = self._engine.add_request(name, {"prompt_token_ids": list(token_ids)}, params)
        return internal

    def step(self) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
        """Runs one of vLLM's steps; returns the new tokens and their log-probabilities, by the request's
        name."""
        found = {}
        with self._naming_dead_workers():
            outputs = self._engine.step()
        if (
            torch.get_num_threads() != self._num_threads
        ):  # vLLM's n-gram drafter, which numba compiles, changes PyTorch's, too
            torch.set_num_threads(self._num_threads)
        for output in outputs:
            (completion,) = output.outputs
            if token_ids := tuple(completion.token_ids):
                logprobs = tuple(
                    scores[token].logprob
                    for scores, token in zip(completion.logprobs, token_ids, strict=True)
                )
                found[output.request_id] = token_ids, logprobs
        return found

    def abort(self, internal_ids: list[str]) -> None:
        """Ends requests; those that have ended already stay as they are."""
        self._engine.abort_request(internal_ids, internal=True)

    def draft(self, depth: int) -> None:
        """Sets how many tokens are drafted at the end of the next step."""
        self._scheduler.num_to_draft = depth

    def give(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Gives requests drafts, by vLLM's names, for the next step to verify in place of vLLM's own."""
        self._scheduler.given = {internal_id: list(tokens) for internal_id, tokens in drafts.items()}

    def used_reference(self, internal_id: str) -> bool:
        """Returns whether what the latest step verified of a request was given."""
        return internal_id in self._scheduler.followed

    def num_verified(self, internal_id: str) -> int:
        """Returns the drafted tokens of a request that the latest step verified."""
        found: int = self._scheduler.num_verified.get(internal_id, 0)
        return found

    def take_preemptions(self) -> int:
        """Returns how many requests vLLM has put back for want of memory since this was asked last."""
        found: int = self._scheduler.num_preempted
        self._scheduler.num_preempted = 0
        return found

    def captured(self, internal_id: str, num_positions: int) -> Tensor | None:
        """Returns what the target captured of a request whose last tokens came in the latest step."""
        if not self.captures:
            return None
        found: Tensor | None = self.call("tlt_captured", internal_id, num_positions)[0]
        return found

    # ── memory ──────────────────────────────────────────────────────────────────────────────────────────────

    def release(self) -> None:
        """Gives memory back until the next policy is loaded: on GPUs vLLM's weights and caches, on a CPU
        what was captured."""
        if self.captures:
            self.call("tlt_release")
        if self.sleeps:
            self.weights.sleep()

    def record(self, records: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Begins or ends keeping what the law draws from; returns what was kept before
        (LawTable.recorded)."""
        return self.call("tlt_record", records)[0] or []

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Calls one of our methods (worker.py) on every worker; returns what each returned."""
        with self._naming_dead_workers():
            found: list[Any] = self._llm.collective_rpc(name, args=arguments)
        return found

    @contextmanager
    def _naming_dead_workers(self) -> Iterator[None]:
        """Says of a call that failed since a worker process is gone, which one and how it ended."""
        executor = self._engine.engine_core.engine_core.model_executor
        processes = [] if self.settings.is_in_process else [worker.proc for worker in executor.workers]
        try:
            yield
        except Exception as error:
            for index, process in enumerate(processes):
                process.join(1)  # a call fails a moment before its worker has ended
                if not process.is_alive():
                    raise RuntimeError(
                        f"vllm: worker {index} has ended: {how_it_ended(process.exitcode)}"
                    ) from error
            raise

    def close(self) -> None:
        """Ends vLLM, and its processes."""
        core = self._engine.engine_core
        if self.settings.is_in_process:
            core.shutdown()
        else:  # and no more: the whole of vLLM's shutdown would end this process's own process group, too
            core.engine_core.model_executor.shutdown()


def quieten() -> None:
    """Lets vLLM say while it is imported what its level of logging allows, and no more: it sets its
    loggers up later. A warning about a name of PyTorch's that vLLM merely looks at is for vLLM's authors."""
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


@contextmanager
def workers_deaf_to_interrupts() -> Iterator[None]:
    """Lets processes be born with SIGINT blocked: Ctrl-C reaches all that a terminal runs, and this one
    decides on it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

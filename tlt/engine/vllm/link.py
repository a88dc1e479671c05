"""Starts vLLM with the law inside, and drives it step by step.

in this process      scheduler and, for one device, the worker
else                 a worker process for every device
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tlt.base.io.processes import how_it_ended
from tlt.engine.vllm.inside.law import Recorded
from tlt.engine.vllm.inside.release import check_installed
from tlt.engine.vllm.inside.verified import Verified
from tlt.engine.vllm.preflight import INVARIANT
from tlt.engine.vllm.settings import VllmSettings
from tlt.engine.vllm.transfer import make_carrier
from tlt.engine.vllm.weights import Weights

_ENVIRONMENT = {
    # keeps the scheduler in this process: draft lengths are set before every step
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # torch.set_num_threads decides
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for a command's result
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def needs_own_process() -> bool:
    """vLLM's worker cannot share a process with a process group, or with numba, whose objects break vLLM's
    search for kernels."""
    return torch.distributed.is_initialized() or "llvmlite" in sys.modules


class Link:
    """A running vLLM. Its methods name requests as `add` does."""

    def __init__(self, settings: VllmSettings) -> None:
        check_installed()
        self.settings, self.dtype, self.max_depth = settings, settings.asked.dtype, settings.max_depth
        self._num_threads = torch.get_num_threads()
        self._internal_ids: dict[str, str] = {}
        """Our name → vLLM's."""
        way = settings.way
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if settings.asked.equal_rows:
            assert "vllm" not in sys.modules or os.environ.get(INVARIANT) == "1", "vLLM read it when imported"
            os.environ[INVARIANT] = "1"
        quieten()
        from tlt.engine.vllm.start import start  # imports vllm, which reads the environment

        with nullcontext() if settings.is_in_process else workers_deaf_to_interrupts():
            self._llm, self._request_params = start(settings)
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
        return self.settings.captures and not self.is_v2

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────

    def add(
        self,
        name: str,
        token_ids: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
        extra_args: dict[str, Any],
    ) -> None:
        params = self._request_params(max_tokens, list(stop_ids), extra_args)
        prompt = {"prompt_token_ids": list(token_ids)}
        self.weights.wake()
        self._internal_ids[name] = self._engine.add_request(name, prompt, params)

    def step(self) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
        """Returns (new tokens, their log-probabilities) by request."""
        found = {}
        with self._naming_dead_workers():
            outputs = self._engine.step()
        if torch.get_num_threads() != self._num_threads:  # numba's n-gram drafter changes PyTorch's, too
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

    def abort(self, names: Sequence[str]) -> None:
        """Also forgets requests that ended by themselves."""
        self._engine.abort_request([self._internal_ids.pop(name) for name in names], internal=True)

    def draft(self, depth: int) -> None:
        """How many tokens the next step drafts at its end, for the step after it."""
        self._scheduler.num_to_draft = depth

    def verified(self, name: str) -> Verified:
        """Of the latest step. Tokens are -1 in vLLM's second runner, which keeps them on the device."""
        found: Verified = self._scheduler.verified.get(self._internal_ids[name], Verified())
        return found

    def take_preemptions(self) -> int:
        """Counts since the last call."""
        found, self._scheduler.num_preempted = self._scheduler.num_preempted, 0
        return found

    def captured(self, name: str, num_positions: int) -> Tensor | None:
        """Features of a request whose last tokens came in the latest step; None: some are missing."""
        if not self.captures:
            return None
        return self.call("tlt_captured", self._internal_ids[name], num_positions)[0]

    # ── memory ──────────────────────────────────────────────────────────────────────────────────────────────

    def release(self) -> None:
        """Frees vLLM's weights and caches (GPUs) or captured features (CPU), until they are needed."""
        if self.captures:
            self.call("tlt_release")
        if self.device.type == "cuda":
            self.weights.sleep()

    def record(self, records: bool) -> list[Recorded]:
        return self.call("tlt_record", records)[0] or []

    def call(self, name: str, *arguments: Any) -> list[Any]:
        with self._naming_dead_workers():
            return self._llm.collective_rpc(name, args=arguments)

    @contextmanager
    def _naming_dead_workers(self) -> Iterator[None]:
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
        core = self._engine.engine_core
        if self.settings.is_in_process:
            core.shutdown()
        else:  # vLLM's whole shutdown would also end this process's own process group
            core.engine_core.model_executor.shutdown()


def quieten() -> None:
    """vLLM logs while it is imported; its FutureWarnings are for its authors."""
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


@contextmanager
def workers_deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal, and this one handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

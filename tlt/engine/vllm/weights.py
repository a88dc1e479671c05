"""Updates of vLLM's weights, the policy's or its drafter's.

policy     wake ─▶ begin ─▶ part, part, … ─▶ end ─▶ the head computes with the new weights? ─▶ cache reset
drafter    wake ─▶ begin ─▶ part ─────────▶ end ─▶ asleep again if it was
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tlt.base.types import UserError
from tlt.engine.vllm.transfer import Carrier, WorkerCall

_HEAD_TOLERANCE = 0.05
"""Relative difference between the head's product and its new weights' product. bfloat16 rounds to 0.4 %;
weights of another policy are far apart."""


class Weights:
    def __init__(self, llm: Any, call: WorkerCall, carrier: Carrier) -> None:
        self._llm, self._call, self._carrier = llm, call, carrier
        self._is_asleep = False

    @contextmanager
    def loading_policy(self) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
        """Yields what takes a policy's parts: tensors by Hugging Face names. Raises where the head then
        computes with other weights (worker.py, tlt_settle)."""
        self.wake()
        with self._loading(is_drafter=False) as load:
            yield load
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vllm: the prefix cache of the old policy could not be reset")

    def load_drafter(self, tensors: Mapping[str, Tensor]) -> None:
        was_asleep = self._is_asleep
        self.wake()
        with self._loading(is_drafter=True) as load:
            load(tensors)
        if was_asleep:
            self.sleep()

    def sleep(self) -> None:
        """Frees weights and caches until `wake`. GPUs only. Asleep, vLLM begins no request."""
        if not self._is_asleep:
            self._llm.sleep(level=1)
            self._is_asleep = True

    @contextmanager
    def _loading(self, is_drafter: bool) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
        self._carrier.begin(is_drafter)
        yield lambda part: self._carrier.carry(is_drafter, part)
        self._carrier.end(is_drafter)
        settled = self._call("tlt_settle", is_drafter)
        worst, missing = max(error for error, _ in settled), settled[0][1]
        if missing:
            absent = f"has nothing for {missing[0]} ({len(missing)} such)"
            raise UserError(f"policy: {absent}; give all of the checkpoint's tensors")
        if worst > _HEAD_TOLERANCE:
            found = f"off by {worst:.2g}"
            raise RuntimeError(f"vllm: the head computes with other weights than it was given ({found})")

    def wake(self) -> None:
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False

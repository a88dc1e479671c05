"""An update of vLLM's weights, the policy's or its drafter's: begun, brought part by part, ended, and seen to
have arrived.

    wake ─▶ begin ─▶ part, part, … ─▶ end ─▶ the head computes with the new weights? ─▶ prefix cache reset        (policy)
            begin ─▶ part ─────────▶ end                                                                         (drafter)

How a part reaches a worker is its carrier's affair (transfer.py). Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tlt.types import UserError
from tlt.vllm.transfer import Call, Carrier

_HEAD_TOLERANCE = 0.05
"""Relative difference between the head's product and its own weights from which on an update has not
arrived: bfloat16 rounds to 0.4 %, and weights of another policy are far apart."""


class Weights:
    """Brings weights into a running vLLM, which sleeps between its rollouts where it can."""

    def __init__(self, llm: Any, call: Call, carrier: Carrier) -> None:
        self._llm, self._call, self._carrier = llm, call, carrier
        self._is_asleep = False

    @contextmanager
    def loading_policy(self) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
        """Yields what takes the parts of a policy, tensors by Hugging Face names. At the end all of it is
        in use, what was cached of the old one is gone, and vLLM's head has been seen to compute with the
        new weights, where it still shows them (worker.py, tlt_settle)."""
        self._wake()
        with self._loading(is_drafter=False) as load:
            yield load
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vllm: the prefix cache of the old policy could not be reset")

    def load_drafter(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the drafter's weights, also while requests run."""
        with self._loading(is_drafter=True) as load:
            load(tensors)

    def sleep(self) -> None:
        """Gives the memory of weights and caches back until the next policy is loaded; on GPUs alone."""
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
            raise UserError(
                f"policy: has nothing for {missing[0]} ({len(missing)} such); give all of the checkpoint's "
                "tensors"
            )
        if worst > _HEAD_TOLERANCE:
            raise RuntimeError(
                f"vllm: the head computes with other weights than it was given (off by {worst:.2g})"
            )

    def _wake(self) -> None:
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False

"""Our calls into vLLM's workers, each on every tensor-parallel rank: new weights, and what was captured.

    begin_policy ─▶ policy_part, policy_part, … ─▶ end_policy          a part: tensors of whole layers, by Hugging Face names

A part is a dictionary where worker and engine share a process, and else the path of a safetensors file in shared memory:
nothing is pickled. Each rank takes its slices of it.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tlt.vllm.inside.packed import forget_experts, head_error, pack_heads
from tlt.vllm.inside.plugin import Installed, register

register()  # a worker of its own process comes here before it loads its model

Part = Mapping[str, Tensor] | str


class TltWorker:
    """vLLM mixes this class into its worker (`worker_extension_cls`)."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    _tlt_awaited: set[str]

    def tlt_hear_termination(self) -> None:
        """Hears SIGTERM, which this process may be born with blocked: a rank that ends waits for those it has sent one."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def tlt_begin(self, is_drafter: bool) -> None:
        """Begins an update of the policy's or the drafter's weights."""
        model = self._tlt_model(is_drafter)
        self._tlt_awaited = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
        if self.device.type == "cpu":
            forget_experts(model)

    def tlt_part(self, is_drafter: bool, part: Part) -> str:
        """Takes a part; returns the digest of what has arrived."""
        tensors = load_file(part) if isinstance(part, str) else part
        with set_current_vllm_config(self.vllm_config):
            loaded = self._tlt_model(is_drafter).load_weights(iter(tensors.items()))
        self._tlt_awaited -= self._tlt_awaited if loaded is None else set(loaded)  # None: a model that does not say
        return digest(tensors) if isinstance(part, str) else ""

    def tlt_end(self, is_drafter: bool) -> tuple[float, list[str]]:
        """Ends it. Returns by how much the head, applied, differs from its own weights (packed.head_error), and the parameters,
        by vLLM's names, for which nothing came. Of a drafter nothing is compared, and it may lack what is the target's."""
        model = self._tlt_model(is_drafter)
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if is_drafter:
                return 0.0, []
            if self.device.type == "cpu":
                pack_heads(model)
            return head_error(model), sorted(self._tlt_awaited)

    def tlt_captured(self, request_id: str, num_positions: int) -> Tensor | None:
        """Returns what was captured of a request that still runs, [num_positions, F]; None where it is not whole."""
        captured = self._tlt_installed.captured
        if captured is None:
            return None
        return captured.read(captured.batch.slots.slot_of(request_id), num_positions)

    def tlt_release(self) -> None:
        if (captured := self._tlt_installed.captured) is not None:
            captured.release()

    def tlt_record(self, records: bool) -> list[tuple[Tensor, Tensor, Tensor]] | None:
        """Begins or ends keeping what is drawn from; returns what was kept (LawTable.recorded)."""
        table = self._tlt_installed.table
        kept, table.recorded = table.recorded, [] if records else None
        return kept

    @property
    def _tlt_installed(self) -> Installed:
        installed: Installed = self.model_runner.tlt
        return installed

    def _tlt_model(self, is_drafter: bool) -> Any:
        return self.get_draft_model() if is_drafter else self.model_runner.get_model()  # type: ignore[attr-defined]  # the worker's own method


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns a hash of names, types and bytes."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()

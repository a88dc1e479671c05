"""Our calls into vLLM's workers, each on every tensor-parallel rank: new weights, and what was captured.

    begin ─▶ part, part, … ─▶ end ─▶ settle          a part: tensors of whole layers, by Hugging Face names

A part is a dictionary where worker and engine share a process, and else the path of a safetensors file in
shared memory, of which each rank takes its slices; or it lies in this GPU's memory, and vLLM's own weight
transfer begins, takes and ends.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from tlt.vllm.inside.digest import digest
from tlt.vllm.inside.packed import forget_experts, head_error, pack_heads
from tlt.vllm.inside.plugin import Installed, register

register()  # a worker of its own process comes here before it loads its model

Part = Mapping[str, Tensor] | str


class TltWorker:
    """vLLM mixes this class into its worker (`worker_extension_cls`)."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    weight_transfer_engine: Any
    _tlt_awaited: frozenset[str] = frozenset()
    """Parameters for which nothing has come in this update, by vLLM's names."""

    def tlt_hear_termination(self) -> None:
        """Hears SIGTERM, which this process may be born with blocked: a rank that ends waits for those it
        has sent one."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def tlt_begin(self, is_drafter: bool) -> None:
        """Begins an update of the policy's or the drafter's weights."""
        model = self._tlt_model(is_drafter)
        self._tlt_awaited = frozenset(name for name, _ in model.named_parameters())
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
        if self.device.type == "cpu":
            forget_experts(model)

    def tlt_part(self, is_drafter: bool, part: Part) -> str:
        """Takes a part; returns the digest of what has arrived."""
        tensors = load_file(part) if isinstance(part, str) else part
        with set_current_vllm_config(self.vllm_config):
            loaded = self._tlt_model(is_drafter).load_weights(iter(tensors.items()))
        self._tlt_awaited -= (
            self._tlt_awaited if loaded is None else set(loaded)
        )  # None: a model that does not say
        return digest(tensors) if isinstance(part, str) else ""

    def tlt_end(self, is_drafter: bool) -> None:
        """Ends it."""
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self._tlt_model(is_drafter), self.vllm_config.model_config)

    def tlt_try_shared(self, part: dict[str, Any]) -> str:
        """Returns the digest of tensors in this GPU's memory as vLLM's weight transfer reads them. No
        weights change."""
        engine, arrived = self.weight_transfer_engine, Arrived()
        engine.set_weight_update_target(arrived, engine.model_config)
        try:
            engine.update_weights(part)
            return digest(arrived.tensors)
        finally:
            engine.reset_weight_update_target()

    def tlt_shared_part(self, part: dict[str, Any]) -> bool:
        """Takes a part that lies in this GPU's memory. Returns whether vLLM has put some of it by, to be
        read later."""
        before = self._tlt_put_by()  # while these are held, no new one has the identity of an old one
        self.update_weights(part)  # type: ignore[attr-defined]  # the worker's own method
        return bool({id(tensor) for tensor in self._tlt_put_by()} - {id(tensor) for tensor in before})

    def tlt_end_shared(self) -> None:
        """Ends the update; nothing of the sender's memory is read afterwards."""
        self.finish_weight_update()  # type: ignore[attr-defined]  # the worker's own method
        torch.accelerator.synchronize()

    def tlt_settle(self, is_drafter: bool) -> tuple[float, list[str]]:
        """Lets what was brought take effect everywhere. Returns by how much a head, applied, differs from
        its own weights (packed.head_error), and the parameters for which nothing came; vLLM's own transfer
        does not say. Of a drafter nothing is compared, and it may lack what is the target's."""
        if is_drafter:
            return 0.0, []
        model = self._tlt_model(is_drafter)
        with set_current_vllm_config(self.vllm_config):
            if self.device.type == "cpu":
                pack_heads(model)
            return head_error(model), sorted(self._tlt_awaited)

    def tlt_captured(self, request_id: str, num_positions: int) -> Tensor | None:
        """Returns what was captured of a request that still runs, [num_positions, F]; None where it is not
        whole."""
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

    def _tlt_put_by(self) -> list[Tensor]:
        """Returns what vLLM keeps of tensors that have arrived, until the layer that they are for is
        whole."""
        layers = self.weight_transfer_engine.model.modules()
        kept = [bound for layer in layers for _, bound in get_layerwise_info(layer).loaded_weights]
        return [value for bound in kept for value in bound.arguments.values() if isinstance(value, Tensor)]


class Arrived:
    """Stands in a model's place, and keeps what is loaded."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.tensors = dict(weights)

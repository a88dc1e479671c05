"""Our methods of vLLM's workers, called on every rank: weight updates and captured features.

    begin ─▶ part, part, … ─▶ end ─▶ settle          a part: tensors of whole layers, by Hugging Face names

A part comes in one of transfer.py's three ways. Of a file each rank takes its slices.
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

from tlt.engine.vllm.inside.block_weights import BlockWeights
from tlt.engine.vllm.inside.law import Recorded
from tlt.engine.vllm.inside.packed import forget_experts, head_error, pack_heads
from tlt.engine.vllm.inside.plugin import InstalledLaw, register
from tlt.models.hf.weights import content_hash

register()  # a worker process imports this module before it loads its model

WeightPart = Mapping[str, Tensor] | str


class TltWorker:
    """vLLM's `worker_extension_cls`."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    weight_transfer_engine: Any
    _tlt_awaited: frozenset[str] = frozenset()
    """Parameters not loaded yet, by vLLM's names."""
    _tlt_block: BlockWeights | None = None
    """None: the update is not of a DFlash drafter."""

    def tlt_hear_termination(self) -> None:
        """Unblocks SIGTERM, perhaps inherited blocked: an ending rank terminates its workers and waits."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def tlt_begin(self, is_drafter: bool) -> None:
        model = self._tlt_model(is_drafter)
        self._tlt_awaited = frozenset(name for name, _ in model.named_parameters())
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
        if self.device.type == "cpu":
            forget_experts(model)
        is_block = is_drafter and self.vllm_config.speculative_config.use_dflash()
        self._tlt_block = BlockWeights(model) if is_block else None

    def tlt_part(self, is_drafter: bool, part: WeightPart) -> str:
        """Returns the digest of a file's tensors."""
        tensors = load_file(part) if isinstance(part, str) else part
        with set_current_vllm_config(self.vllm_config):
            loaded = self._tlt_model(is_drafter).load_weights(iter(tensors.items()))
        if self._tlt_block is not None:
            self._tlt_block.take(tensors)
        # None: this model does not tell what it has loaded
        self._tlt_awaited -= self._tlt_awaited if loaded is None else set(loaded)
        return content_hash(tensors) if isinstance(part, str) else ""

    def tlt_end(self, is_drafter: bool) -> None:
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self._tlt_model(is_drafter), self.vllm_config.model_config)
            if self._tlt_block is not None:
                self._tlt_block.end()

    def tlt_try_shared(self, part: dict[str, Any]) -> str:
        """Digest of what vLLM's weight transfer reads."""
        engine, arrived = self.weight_transfer_engine, Arrived()
        engine.set_weight_update_target(arrived, engine.model_config)
        try:
            engine.update_weights(part)
            return content_hash(arrived.tensors)
        finally:
            engine.reset_weight_update_target()

    def tlt_shared_part(self, part: dict[str, Any]) -> bool:
        """Returns whether vLLM has buffered some of the part to read later."""
        before = self._tlt_buffered()  # holding these keeps their ids from being reused
        self.update_weights(part)  # type: ignore[attr-defined]  # the worker's own method
        return bool(set(map(id, self._tlt_buffered())) - set(map(id, before)))

    def tlt_end_shared(self) -> None:
        """The sender's memory is not read afterwards."""
        self.finish_weight_update()  # type: ignore[attr-defined]  # the worker's own method
        torch.accelerator.synchronize()

    def tlt_settle(self, is_drafter: bool) -> tuple[float, list[str]]:
        """Returns packed.head_error, and parameters not loaded (unknown after vLLM's own transfer). A drafter
        is not checked."""
        if is_drafter:
            return 0.0, []
        model = self._tlt_model(is_drafter)
        with set_current_vllm_config(self.vllm_config):
            if self.device.type == "cpu":
                pack_heads(model)
            return head_error(model), sorted(self._tlt_awaited)

    def tlt_clear_caches(self) -> None:
        """Attention multiplies a block's empty places by 0: NaN there would reach the block's next
        request."""
        for cache in self.model_runner.kv_caches:
            for part in cache if isinstance(cache, list | tuple) else (cache,):
                part.zero_()

    def tlt_captured(self, request_id: str, num_positions: int) -> Tensor | None:
        """[num_positions, F]; None: some are missing."""
        capture = self._tlt_installed.capture
        if capture is None:
            return None
        return capture.read(capture.batch.slots.slot_of(request_id), num_positions)

    def tlt_release(self) -> None:
        if (capture := self._tlt_installed.capture) is not None:
            capture.release()

    def tlt_record(self, records: bool) -> list[Recorded] | None:
        table = self._tlt_installed.table
        kept, table.recorded = table.recorded, [] if records else None
        return kept

    @property
    def _tlt_installed(self) -> InstalledLaw:
        return self.model_runner.tlt

    def _tlt_model(self, is_drafter: bool) -> Any:
        # the worker's own method
        if is_drafter:
            return self.get_draft_model()  # type: ignore[attr-defined]
        return self.model_runner.get_model()

    def _tlt_buffered(self) -> list[Tensor]:
        """vLLM keeps these tensors until their layer is complete."""
        layers = self.weight_transfer_engine.model.modules()
        kept = [bound for layer in layers for _, bound in get_layerwise_info(layer).loaded_weights]
        return [value for bound in kept for value in bound.arguments.values() if isinstance(value, Tensor)]


class Arrived:
    """Stands in for a model."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.tensors = dict(weights)

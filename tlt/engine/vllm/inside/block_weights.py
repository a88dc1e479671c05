"""Updates the weights of vLLM's DFlash drafter, and those of its context.

    layers    vLLM's own reload
    context   copies that vLLM made of all layers' k_proj, v_proj and k_norm when it started, written in
              place, since graphs may read them

vLLM's reload would make the copies anew from layers that a CPU has packed meanwhile, and look for the
drafter's folder, which is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class BlockWeights:
    """One update of vLLM's DFlash drafter."""

    def __init__(self, model: Any) -> None:
        self.model, self.context = model, dict[str, Tensor]()
        model._read_mask_embedding = model.model._build_fused_kv_buffers = lambda: None

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        kinds = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "hidden_norm.weight")
        self.context |= {name: tensor for name, tensor in tensors.items() if name.endswith(kinds)}

    @torch.no_grad()
    def end(self) -> None:
        del self.model._read_mask_embedding, self.model.model._build_fused_kv_buffers
        if not self.context:  # the head alone has changed
            return
        backbone, attentions = self.model.model, [layer.self_attn for layer in self.model.model.layers]
        names = [f"layers.{index}.self_attn." for index in range(len(attentions))]
        for number, (name, attention) in enumerate(zip(names, attentions, strict=True)):
            backbone._k_norm_weights[number].copy_(self.context[f"{name}k_norm.weight"])
            rows = attention.kv_size
            for half, kind in enumerate("kv"):
                start = (2 * number + half) * rows
                own = self._own_rows(self.context[f"{name}{kind}_proj.weight"], attention)
                backbone._fused_kv_weight[start : start + rows].copy_(own)
        backbone._hidden_norm_weight.copy_(self.context["hidden_norm.weight"])

    def _own_rows(self, weight: Tensor, attention: Any) -> Tensor:
        """Rows of this tensor-parallel rank."""
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        first = rank * attention.total_num_kv_heads // size * attention.head_dim
        return weight[first : first + attention.kv_size]


def mend_key_norms(model: Any) -> None:
    """vLLM's CPU kernel applies the first layer's k_norm to all layers; this applies each layer's."""

    def normalize(keys_LNKD: Tensor) -> Tensor:
        eps, norms_LD = model._rms_norm_eps, model._k_norm_weights
        scale = torch.rsqrt(keys_LNKD.float().square().mean(-1, keepdim=True) + eps)
        return (keys_LNKD.float() * scale).to(keys_LNKD.dtype) * norms_LD[:, None, None]

    model._normalize_context_k = normalize

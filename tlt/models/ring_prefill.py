"""A prompt's attention in compiled loops where layers are rings: a ring cannot hold the whole prompt, so its
keys and values are stored elsewhere first."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tlt.models.attention_form import PLAIN, AttentionForm
from tlt.models.decoder import ModelConfig
from tlt.models.kv_cache import store


class RingPrefill:
    def __init__(
        self,
        loops: ModuleType,
        config: ModelConfig,
        families: Sequence[tuple[int, Sequence[int]]],
        layers_SKLD: Sequence[Tensor],
        slots: Sequence[int],
    ) -> None:
        self.layers, self.slots = layers_SKLD, slots
        self.lengths = [prompt + num_own for prompt, own in families for num_own in own or [0]]
        self.num_heads, self.dim = 2 * config.num_kv_heads, config.head_dim
        num = sum(self.lengths) * self.num_heads * self.dim
        self.whole = torch.empty(num, dtype=layers_SKLD[0].dtype)
        self.attend = loops.Packed(config, families, [self.whole] * len(layers_SKLD), None)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        positions_N: Tensor = self.attend.positions(device)
        return positions_N

    def __call__(self, layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        out_NC: Tensor = self.attend(layer, qkv_NSD, form)
        parts = self.whole.split([length * self.num_heads * self.dim for length in self.lengths])
        for slot, length, part in zip(self.slots, self.lengths, parts, strict=True):
            store(self.layers[layer], slot, 0, part.view(self.num_heads, length, self.dim))
        return out_NC

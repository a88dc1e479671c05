"""The one-layer drafter in EAGLE's form (arXiv 2401.15077), and THE alignment of tokens with features.

    pair t:  embedding(token t+1) ‖ feature t ─ fc ─▶ one decoder layer ─▶ predicted feature t+1 ─ target's head ─▶ token t+2

Feature t is the output of the target's final norm at position t. A pair has the rotary position t. When drafting, the
predicted feature takes the place of the true one. The drafter borrows the target's embedding and head; it holds no
reference to them, so it cannot change them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tlt.models.transformer import Attend, DecoderLayer, Linear, ModelConfig, PackedLayer, PackedLinear, Rope, run_layer

TOKEN_AHEAD = 1
"""Pair t joins feature t with token t + TOKEN_AHEAD, and predicts the feature of that token."""


@dataclass(frozen=True)
class Alignment:
    """Where the pairs of several packed sequences lie, as indices into their flat tokens and features."""

    lengths: tuple[int, ...]
    feature_index_M: Tensor
    token_index_M: Tensor
    positions_M: Tensor

    @property
    def target_index_M(self) -> Tensor:
        """Whose feature each pair predicts: the token it has just read."""
        return self.token_index_M


def align(lengths: Sequence[int]) -> Alignment:
    """Pairs of sequences packed one after the other: a sequence of n tokens has n - 1."""
    features, positions, start = [], [], 0
    for length in lengths:
        pairs = torch.arange(length - TOKEN_AHEAD)
        positions.append(pairs)
        features.append(pairs + start)
        start += length
    feature_index = torch.cat(features)
    return Alignment(tuple(n - TOKEN_AHEAD for n in lengths), feature_index, feature_index + TOKEN_AHEAD, torch.cat(positions))


def drafter_config(target: ModelConfig) -> ModelConfig:
    """One layer of Llama form in the target's geometry, whatever the target's family: engines serve no other."""
    return dataclasses.replace(target, architecture="llama", num_layers=1, tie_embeddings=True)


class DraftModel(nn.Module):
    """The trainable drafter. `state_dict()` has the names that vLLM's EAGLE loader reads (fc.weight, layers.0.*)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, has_input_norm=False)])
        self._rope: Rope | None = None

    def initialize(self, seed: int) -> DraftModel:
        """Random weights from the seed. fc starts as "pass the feature on", so that training starts near copying."""
        generator = torch.Generator().manual_seed(seed)
        size = self.config.hidden_size
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.copy_(noise * 0.02)
            self.fc.weight[:, size:] += torch.eye(size, dtype=self.fc.weight.dtype)
        return self

    def forward(self, embeddings_ME: Tensor, features_ME: Tensor, positions_M: Tensor, attend: Attend) -> Tensor:
        """Predicted features_ME."""
        x_ME = self.fc(torch.cat([embeddings_ME, features_ME], dim=-1))
        if self._rope is None or self._rope.cos_P1D.dtype != x_ME.dtype or self._rope.cos_P1D.device != x_ME.device:
            self._rope = Rope(self.config, self.config.max_positions, x_ME.dtype, x_ME.device)
        return run_layer(self.layers[0], 0, x_ME, self._rope.at(positions_M), attend)  # type: ignore[arg-type]


class PackedDrafter:
    """The engine's copy of a drafter."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.fc = PackedLinear(2 * config.hidden_size, config.hidden_size, dtype, self.device)
        self.layer = PackedLayer(config, dtype, self.device, has_input_norm=False)
        self.rope = Rope(config, config.max_positions, dtype, self.device)
        self.version = -1

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copies a drafter in. Everything must arrive: KeyError or RuntimeError otherwise."""
        self.fc.load(tensors["fc.weight"].detach())
        self.layer.load(tensors, "layers.0.")
        self.version = version

    def forward(self, embeddings_NE: Tensor, features_NE: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        x_NE = self.fc(torch.cat([embeddings_NE, features_NE], dim=-1))
        return run_layer(self.layer, 0, x_NE, self.rope.at(positions_N), attend)

"""The one-layer drafter, and THE alignment of tokens with features.

    pair t:  embedding(token t+1), hidden t ─▶ one decoder layer ─▶ hidden t+1 ─ head ─▶ token t+2

    eagle    hidden t = feature t, the output of the target's final norm         fc joins it with the embedding
    eagle3   hidden t = fc(residual sums of three of the target's layers at t)   attention reads norm(embedding) ‖ norm(hidden)

A pair has the rotary position t. When drafting, the drafter's own hidden state takes the place of one made from the
target's features. `eagle` (arXiv 2401.15077) applies the target's head to it directly; `eagle3` (arXiv 2503.01840) through
a norm of its own. The drafter borrows the target's embedding and head; it cannot change them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.models.decoder import Attend, DecoderLayer, Linear, ModelConfig, RMSNorm, Rope, run_layer
from tlt.models.packed import PackedLayer, PackedLinear, PackedNorm, PackedTransformer
from tlt.types import UserError

Method = Literal["eagle", "eagle3"]

TOKEN_AHEAD = 1
"""Pair t joins feature t with token t + TOKEN_AHEAD, and predicts the feature of that token."""


@dataclass(frozen=True)
class Alignment:
    """Where the pairs of several packed sequences lie, as indices into their flat tokens and features."""

    lengths: tuple[int, ...]
    feature_index_M: Tensor
    token_index_M: Tensor
    positions_M: Tensor

    def ahead(self, num_steps: int) -> tuple[Tensor, Tensor]:
        """(token index, whether it exists) of the pairs after each has drafted `num_steps` times: it reads a token so much
        further on, and predicts the feature of that token. Beyond the sequence's end its last token stands in."""
        lengths_S = torch.tensor(self.lengths, device=self.token_index_M.device)
        last_S = lengths_S.cumsum(0) + torch.arange(len(lengths_S), device=lengths_S.device)
        last_M = torch.repeat_interleave(last_S, lengths_S, output_size=len(self.token_index_M))
        index_M = self.token_index_M + num_steps
        return torch.minimum(index_M, last_M), index_M <= last_M


def align(lengths: Sequence[int], device: torch.device | str = "cpu") -> Alignment:
    """Pairs of sequences packed one after the other: a sequence of n tokens has n - 1. device: where their indices lie."""
    features, positions, start = [], [], 0
    for length in lengths:
        pairs = torch.arange(length - TOKEN_AHEAD, device=device)
        positions.append(pairs)
        features.append(pairs + start)
        start += length
    feature_index = torch.cat(features)
    return Alignment(tuple(n - TOKEN_AHEAD for n in lengths), feature_index, feature_index + TOKEN_AHEAD, torch.cat(positions))


@dataclass(frozen=True)
class DraftConfig:
    """The shape of a drafter.

    layer: geometry of its one decoder layer, of Llama form; its vocabulary is the target's.
    capture: what it reads of the target at a position: inputs of these layers, or (the number of layers) the features.
    draft_vocab_size: tokens it can propose; when fewer than the target has, d2t says which.
    owns_head: it brought a head of its own (a foreign drafter); else it uses the target's rows, as they are at the moment.
    has_bias: fc adds a bias (a foreign drafter; ours have none, because vLLM's has none).
    """

    method: Method
    layer: ModelConfig
    capture: tuple[int, ...]
    draft_vocab_size: int
    owns_head: bool = False
    has_bias: bool = False

    @property
    def feature_size(self) -> int:
        return len(self.capture) * self.layer.hidden_size

    @property
    def is_reduced(self) -> bool:
        return self.draft_vocab_size < self.layer.vocab_size

    @property
    def layer_name(self) -> str:
        """Where the layer's tensors lie."""
        return "layers.0" if self.method == "eagle" else "midlayer"

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """Norms of what attention reads: EAGLE's reads fc's output raw."""
        return () if self.method == "eagle" else ("input_layernorm", "hidden_norm")

    @property
    def fc_size(self) -> int:
        """What fc reads: embedding and feature, or the features of all captured layers."""
        return 2 * self.layer.hidden_size if self.method == "eagle" else self.feature_size


def drafter_config(target: ModelConfig, method: Method = "eagle", draft_vocab_size: int | None = None) -> DraftConfig:
    """A drafter in the target's geometry, whatever the target's family: engines serve no other than Llama's form."""
    layer = dataclasses.replace(target, architecture="llama", num_layers=1, tie_embeddings=True)
    capture = (target.num_layers,) if method == "eagle" else capture_layers(target.num_layers)
    return DraftConfig(method, layer, capture, draft_vocab_size or target.vocab_size)


def training_capture(config: DraftConfig, num_layers: int) -> tuple[int, ...]:
    """What training needs captured: what the drafter reads, and at the end the target's features, which give the
    distribution to match."""
    return config.capture if config.capture[-1] == num_layers else (*config.capture, num_layers)


def capture_layers(num_layers: int) -> tuple[int, int, int]:
    """An early, a middle and a late layer, as vLLM and SGLang have them by default; nearer the ends of a short model."""
    if num_layers < 4:
        raise UserError(f"an eagle3 drafter reads three layers; this model has only {num_layers}, so use eagle")
    return (2, num_layers // 2, num_layers - 3) if num_layers > 6 else (1, num_layers // 2, num_layers - 1)


class DraftModel(nn.Module):
    """The trainable drafter. `state_dict()` has the names that vLLM's EAGLE loaders read. The draft vocabulary and a head of
    its own are never trained."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        size, vocab = config.layer.hidden_size, config.layer.vocab_size
        self.fc = Linear(config.fc_size, size, bias=config.has_bias)
        layer = DecoderLayer(config.layer, norms=config.layer_norms)
        if config.method == "eagle":
            self.layers = nn.ModuleList([layer])
        else:
            self.midlayer = layer
            self.norm = RMSNorm(size, config.layer.rms_norm_eps)
        if config.is_reduced:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool))
        if config.owns_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False).requires_grad_(False)
        self._rope: Rope | None = None

    def initialize(self, seed: int) -> DraftModel:
        """Random weights from the seed. fc starts as "pass the feature on" (of the latest layer captured), so that training
        starts near copying; the draft vocabulary as the lowest ids."""
        generator = torch.Generator().manual_seed(seed)
        size = self.config.layer.hidden_size
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.copy_(noise * 0.02)
            self.fc.weight[:, -size:] += torch.eye(size, dtype=self.fc.weight.dtype)
            if self.config.is_reduced:
                self.set_vocabulary(torch.arange(self.config.draft_vocab_size))
        return self

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """token_ids: the tokens that can be proposed, rising."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids)))
        self.t2d.zero_()[token_ids] = True

    def fuse(self, features_MF: Tensor) -> Tensor:
        """The hidden state that stands for what the target's features say; what else was captured for training comes after
        them and is not read."""
        features_MF = features_MF[..., : self.config.feature_size]
        return features_MF if self.config.method == "eagle" else self.fc(features_MF)

    def forward(self, embeddings_ME: Tensor, hidden_ME: Tensor, positions_M: Tensor, attend: Attend) -> Tensor:
        """The next hidden_ME."""
        if self._rope is None or self._rope.cos_P1D.dtype != hidden_ME.dtype or self._rope.cos_P1D.device != hidden_ME.device:
            self._rope = Rope(self.config.layer, self.config.layer.max_positions, hidden_ME.dtype, hidden_ME.device)
        rope, pair = self._rope.at(positions_M), torch.cat([embeddings_ME, hidden_ME], dim=-1)
        if self.config.method == "eagle":
            return run_layer(self.layers[0], 0, self.fc(pair), rope, attend)  # type: ignore[arg-type]  # ModuleList yields Module
        return run_layer(self.midlayer, 0, hidden_ME, rope, attend, pair)

    def logits(self, hidden_ME: Tensor, head_VE: Tensor) -> Tensor:
        """Over the draft vocabulary, whose rows of the head are given."""
        return F.linear(self.norm(hidden_ME) if self.config.method == "eagle3" else hidden_ME, head_VE)

    def restrict(self, rows_V: Tensor) -> Tensor:
        """Those rows that belong to the draft vocabulary."""
        return rows_V[draft_token_ids(self.d2t)] if self.config.is_reduced else rows_V


def draft_token_ids(d2t: Tensor) -> Tensor:
    """The target's id of each draft token; `d2t` holds differences."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def check_arrival(config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
    """RuntimeError, naming the tensor, where one is missing, unexpected or of another shape."""
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in DraftModel(config).state_dict().items()}
    for name in sorted(expected.keys() | tensors.keys()):
        found = list(tensors[name].shape) if name in tensors else "missing"
        wanted = list(expected[name]) if name in expected else "no such tensor"
        if found != wanted:
            raise RuntimeError(f"drafter: tensor {name} is {found}, expected was {wanted}")


class PackedDrafter:
    """The engine's copy of a drafter."""

    def __init__(self, config: DraftConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        size = config.layer.hidden_size
        self.fc = PackedLinear(config.fc_size, size, dtype, self.device, has_bias=config.has_bias)
        self.layer = PackedLayer(config.layer, dtype, self.device, norms=config.layer_norms)
        self.norm = PackedNorm(size, config.layer.rms_norm_eps, dtype, self.device)
        self.gain_E = torch.ones(size, dtype=dtype, device=self.device)
        has_rows = config.owns_head or config.is_reduced
        self.head = PackedLinear(size, config.draft_vocab_size, dtype, self.device) if has_rows else None
        self.token_ids: Tensor | None = None
        self.rope = Rope(config.layer, config.layer.max_positions, dtype, self.device)
        self.version = -1
        self._head_version = -1

    @classmethod
    def from_tensors(
        cls, config: DraftConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> PackedDrafter:
        packed = cls(config, dtype, device)
        packed.load(tensors, version=0)
        return packed

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copies a drafter in. Exactly its tensors must arrive, in their shapes; else RuntimeError, and nothing changes."""
        check_arrival(self.config, tensors)
        self.fc.load(tensors["fc.weight"].detach(), tensors["fc.bias"].detach() if self.config.has_bias else None)
        self.layer.load(tensors, self.config.layer_name + ".")
        if self.config.method == "eagle3":
            self.gain_E.copy_(self.norm.load(tensors["norm.weight"].detach()))
        if self.config.is_reduced:
            self.token_ids = draft_token_ids(tensors["d2t"].to(self.device))
        if self.config.owns_head:
            assert self.head is not None
            self.head.load(tensors["lm_head.weight"].detach())
        self.version, self._head_version = version, -1

    def fuse(self, features_NF: Tensor) -> Tensor:
        """As `DraftModel.fuse`, like all that follows."""
        features_NF = features_NF[..., : self.config.feature_size]
        return features_NF if self.config.method == "eagle" else self.fc(features_NF)

    def forward(self, embeddings_NE: Tensor, hidden_NE: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        rope, pair_NI = self.rope.at(positions_N), torch.cat([embeddings_NE, hidden_NE], dim=-1)
        if self.config.method == "eagle":
            return run_layer(self.layer, 0, self.fc(pair_NI), rope, attend)
        return run_layer(self.layer, 0, hidden_NE, rope, attend, pair_NI)

    def logits(self, hidden: Tensor, target: PackedTransformer) -> Tensor:
        """[..., draft vocabulary]"""
        if self.config.method == "eagle3":
            hidden = self.norm(hidden)
            if self.norm.is_folded:
                hidden = hidden * self.gain_E
        if self.head is None:
            return target.logits(hidden)
        if not self.config.owns_head and self._head_version != target.version:
            self.head.load(target.head_VE[self.token_ids])
            self._head_version = target.version
        return self.head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)

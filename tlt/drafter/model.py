"""The one-layer drafter: its shape, its trainable and its packed copy, and the alignment of tokens with the
target's features.

    pair t:  embedding(token t+1), hidden t ─▶ one decoder layer ─▶ hidden t+1 ─ head ─▶ token t+2

    eagle    hidden t = feature t, the output of the target's final norm
             fc joins it with the embedding
    eagle3   hidden t = fc(residual sums of three of the target's layers at t)
             attention reads norm(embedding) ‖ norm(hidden)

drafting/learned.py says what a feature is and why a pair joins it with the next token. Pair t has the rotary
position t. While drafting, the drafter reads its own hidden state in place of one made from the target's
features. `eagle` (arXiv 2401.15077) applies the target's head to the hidden state; `eagle3` (arXiv
2503.01840) applies a norm of its own first. The drafter borrows the target's embedding and head, and never
changes them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.models.decoder import (
    Attend,
    DecoderLayer,
    Linear,
    ModelConfig,
    RMSNorm,
    Rope,
    randomize_matrices,
    run_layer,
)
from tlt.models.packed import PackedLayer, PackedLinear, PackedNorm, PackedTransformer
from tlt.types import UserError

Method = Literal["eagle", "eagle3"]

TOKEN_AHEAD = 1
"""Pair t joins feature t with token t + TOKEN_AHEAD, and predicts the feature of that token."""

FIRST_PREDICTED = TOKEN_AHEAD + 1
"""Pair t predicts token t + FIRST_PREDICTED: the feature of a token gives the distribution of the next
one. No pair predicts the tokens at positions below FIRST_PREDICTED."""


def predicts_response(num_prompt: int, start: int, num_tokens: int) -> Tensor:
    """Returns bool[num_tokens - 1]: whether each pair of a window predicts a response token. The window holds
    `num_tokens` tokens from position `start` on, of a sequence whose response begins at `num_prompt`."""
    return torch.arange(num_tokens - TOKEN_AHEAD) + start + FIRST_PREDICTED >= num_prompt


@dataclass(frozen=True)
class Alignment:
    """The M pairs of several packed sequences.

    lengths: pairs of each sequence.
    feature_index_M: index of each pair's feature among the packed features.
    token_index_M: index of the token that each pair reads among the packed tokens.
    positions_M: rotary position of each pair, from 0 in every sequence.
    """

    lengths: tuple[int, ...]
    feature_index_M: Tensor
    token_index_M: Tensor
    positions_M: Tensor

    def ahead(self, num_steps: int) -> tuple[Tensor, Tensor]:
        """Returns (index, whether it exists) of the token that each pair reads after it has drafted
        `num_steps`
        times: the token as many places further on. Beyond its end, a sequence's last token stands in."""
        lengths_S = torch.tensor(self.lengths, device=self.token_index_M.device)
        last_S = lengths_S.cumsum(0) + torch.arange(len(lengths_S), device=lengths_S.device)
        last_M = torch.repeat_interleave(last_S, lengths_S, output_size=len(self.token_index_M))
        index_M = self.token_index_M + num_steps
        return torch.minimum(index_M, last_M), index_M <= last_M


def align(lengths: Sequence[int], device: torch.device | str = "cpu") -> Alignment:
    """Returns the pairs of packed sequences of these lengths, as indices on the device. A sequence of n
    tokens has n - 1 pairs."""
    num_pairs = tuple(length - TOKEN_AHEAD for length in lengths)
    positions = [torch.arange(num, device=device) for num in num_pairs]
    starts = itertools.accumulate(lengths, initial=0)
    feature_index_M = torch.cat([pairs + start for pairs, start in zip(positions, starts, strict=False)])
    return Alignment(num_pairs, feature_index_M, feature_index_M + TOKEN_AHEAD, torch.cat(positions))


@dataclass(frozen=True)
class DrafterShape:
    """The shape of a drafter, which determines the names and sizes of its tensors.

    layer: geometry of its decoder layer, of Llama form; the vocabulary is the target's.
    capture: the target's layers whose inputs it reads at a position. The target's number of layers stands for
        the features, the output of the final norm.
    draft_vocab_size: tokens it can propose. If they are fewer than the target's, the tensor d2t lists them.
    owns_head: whether it has its own head, as foreign drafters may; otherwise it uses rows of the target's
        head.
    has_bias: whether fc has a bias, as in foreign drafters. Ours have none, because vLLM's has none.
    """

    method: Method
    layer: ModelConfig
    capture: tuple[int, ...]
    draft_vocab_size: int
    owns_head: bool = False
    has_bias: bool = False

    @property
    def feature_size(self) -> int:
        """Numbers that it reads of the target at a position."""
        return len(self.capture) * self.layer.hidden_size

    @property
    def is_reduced(self) -> bool:
        return self.draft_vocab_size < self.layer.vocab_size

    @property
    def can_choose(self) -> bool:
        """Whether the tokens it proposes can be chosen: its own head or vocabulary fixes them."""
        return not (self.owns_head or self.is_reduced)

    @property
    def layer_name(self) -> str:
        """Prefix of the layer's tensor names."""
        return "layers.0" if self.method == "eagle" else "midlayer"

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """Names of the norms before attention. EAGLE has none: its attention reads the output of fc."""
        return () if self.method == "eagle" else ("input_layernorm", "hidden_norm")

    @property
    def fc_size(self) -> int:
        """Input width of fc: embedding and feature, or all captured layers."""
        return 2 * self.layer.hidden_size if self.method == "eagle" else self.feature_size


def drafter_shape(
    target: ModelConfig, method: Method = "eagle", draft_vocab_size: int | None = None
) -> DrafterShape:
    """Returns the shape of a drafter for the target. Its layer has the target's sizes, but always Llama's
    form: other engines serve no other."""
    layer = dataclasses.replace(target, architecture="llama", num_layers=1, tie_embeddings=True)
    capture = (target.num_layers,) if method == "eagle" else capture_layers(target.num_layers)
    return DrafterShape(method, layer, capture, draft_vocab_size or target.vocab_size)


def training_capture(config: DrafterShape, num_layers: int) -> tuple[int, ...]:
    """Returns the layers to capture for training: those that the drafter reads, then `num_layers`, the
    target's features, which give the distribution to match. EAGLE reads the features themselves, captured
    once.

        columns    │ inputs of the layers that the drafter reads │ the target's features │
    """
    return config.capture if config.capture[-1] == num_layers else (*config.capture, num_layers)


def capture_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns an early, a middle and a late layer: the defaults of vLLM and SGLang, or nearer the ends of
    a model with few layers."""
    if num_layers < 4:
        raise UserError(
            f"an eagle3 drafter reads three layers; this model has only {num_layers}, so use eagle"
        )
    return (2, num_layers // 2, num_layers - 3) if num_layers > 6 else (1, num_layers // 2, num_layers - 1)


class DraftModel(nn.Module):
    """The trainable drafter. `state_dict()` has the names that vLLM's EAGLE loaders read. Its own draft
    vocabulary and head, if any, are never trained."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterShape) -> None:
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
        """Draws random weights from the seed and returns the model. fc starts near the identity on the
        latest captured layer, so that training starts near copying the feature. A reduced draft vocabulary
        starts as the lowest ids."""
        randomize_matrices(self, seed)
        size = self.config.layer.hidden_size
        with torch.no_grad():
            self.fc.weight[:, -size:] += torch.eye(size, dtype=self.fc.weight.dtype)
            if self.config.is_reduced:
                self.set_vocabulary(torch.arange(self.config.draft_vocab_size))
        return self

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Sets the tokens to propose: int64[draft vocabulary], ascending."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids)))
        self.t2d.zero_()[token_ids] = True

    def fuse(self, features_MF: Tensor) -> Tensor:
        """Returns the hidden states [M, E] made from the captured columns; those beyond `feature_size` are
        not read."""
        features_MF = features_MF[..., : self.config.feature_size]
        return features_MF if self.config.method == "eagle" else self.fc(features_MF)

    def forward(
        self, embeddings_ME: Tensor, hidden_ME: Tensor, positions_M: Tensor, attend: Attend
    ) -> Tensor:
        """Returns the next hidden_ME: the predicted features of the embedded tokens."""
        self._rope = Rope.matching(hidden_ME, self.config.layer, self._rope)
        rope, pair = self._rope.at(positions_M), torch.cat([embeddings_ME, hidden_ME], dim=-1)
        if self.config.method == "eagle":
            hidden: Tensor = self.layers[0](0, self.fc(pair), rope, attend)
        else:
            hidden = self.midlayer(0, hidden_ME, rope, attend, pair)
        return hidden

    def logits(self, hidden_ME: Tensor, head_VE: Tensor) -> Tensor:
        """Returns logits [M, draft vocabulary]. head_VE: the head's rows of the draft vocabulary."""
        return F.linear(self.norm(hidden_ME) if self.config.method == "eagle3" else hidden_ME, head_VE)

    def restrict(self, rows_V: Tensor) -> Tensor:
        """Returns the rows of the draft vocabulary, of a tensor with a row per token of the target."""
        return rows_V[draft_token_ids(self.d2t)] if self.config.is_reduced else rows_V


def draft_token_ids(d2t: Tensor) -> Tensor:
    """Returns the target's id of each draft token. d2t: target id minus draft id."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def find_mismatch(config: DrafterShape, tensors: Mapping[str, Tensor]) -> str | None:
    """Returns a description of the first tensor, by name, that is missing, unexpected or of another shape;
    None if all match."""
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in DraftModel(config).state_dict().items()}
    for name in sorted(expected.keys() | tensors.keys()):
        found = list(tensors[name].shape) if name in tensors else "missing"
        wanted = list(expected[name]) if name in expected else "no such tensor"
        if found != wanted:
            return f"tensor {name} is {found}, expected was {wanted}"
    return None


class PackedDrafter:
    """The engine's copy of a drafter: packed weights, no gradients. It computes what `DraftModel`
    computes."""

    def __init__(self, config: DrafterShape, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        size = config.layer.hidden_size
        self.fc = PackedLinear(config.fc_size, size, dtype, self.device, has_bias=config.has_bias)
        self.layer = PackedLayer(config.layer, dtype, self.device, norms=config.layer_norms)
        self.norm = PackedNorm(size, config.layer.rms_norm_eps, dtype, self.device)
        self.gain_E = torch.ones(size, dtype=dtype, device=self.device)
        has_rows = config.owns_head or config.is_reduced
        self.head = PackedLinear(size, config.draft_vocab_size, dtype, self.device) if has_rows else None
        self.token_ids: Tensor | None = None  # the tokens it can propose; None: all of the target's
        self.rope = Rope(config.layer, dtype, self.device)
        self.version = -1
        self._head_version = -1

    @classmethod
    def from_tensors(
        cls,
        config: DrafterShape,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> PackedDrafter:
        packed = cls(config, dtype, device)
        packed.load(tensors, version=0)
        return packed

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copies a drafter's weights in. RuntimeError, before anything changes, if a tensor is missing,
        unexpected or of another shape."""
        if (mismatch := find_mismatch(self.config, tensors)) is not None:
            raise RuntimeError(f"drafter: {mismatch}")
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.fc.load(tensors["fc.weight"], tensors.get("fc.bias"))
        self.layer.load(tensors, self.config.layer_name + ".")
        if self.config.method == "eagle3":
            self.gain_E.copy_(self.norm.load(tensors["norm.weight"]))
        if self.config.is_reduced:
            self.token_ids = draft_token_ids(tensors["d2t"].to(self.device))
        if self.config.owns_head:
            assert self.head is not None
            self.head.load(tensors["lm_head.weight"])
        self.version, self._head_version = version, -1

    @property
    def num_proposed(self) -> int:
        """Number of tokens it can propose."""
        return self.config.draft_vocab_size if self.token_ids is None else len(self.token_ids)

    def choose(self, token_ids: Tensor | None) -> None:
        """Sets the tokens it proposes from now on, ascending; None: all. No weight changes: it ranks with
        these rows of the target's head."""
        assert self.config.can_choose, "its folder fixes them"
        if token_ids is None:
            self.head = None
        elif self.head is None or self.head.shape[0] != len(token_ids):
            self.head = PackedLinear(self.config.layer.hidden_size, len(token_ids), self.dtype, self.device)
        self.token_ids = None if token_ids is None else token_ids.to(self.device)
        self._head_version = -1

    def fuse(self, features_NF: Tensor) -> Tensor:
        """Computes `DraftModel.fuse`; the two methods below correspond likewise."""
        features_NF = features_NF[..., : self.config.feature_size]
        return features_NF if self.config.method == "eagle" else self.fc(features_NF)

    def forward(
        self, embeddings_NE: Tensor, hidden_NE: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        rope, pair_NI = self.rope.at(positions_N), torch.cat([embeddings_NE, hidden_NE], dim=-1)
        if self.config.method == "eagle":
            return run_layer(self.layer, 0, self.fc(pair_NI), rope, attend)
        return run_layer(self.layer, 0, hidden_NE, rope, attend, pair_NI)

    def logits(self, hidden: Tensor, target: PackedTransformer) -> Tensor:
        """Returns logits [..., draft vocabulary]. Borrowed rows are those of the target's current head."""
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

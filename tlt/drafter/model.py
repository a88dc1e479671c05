"""The one-layer drafter: its shape, its trainable and its packed copy, and how tokens are aligned with the
target's features.

    pair t:  embedding(token t+1), hidden t ─▶ one decoder layer ─▶ hidden t+1 ─ head ─▶ token t+2

    eagle    hidden t = feature t, the output of the target's final norm         fc joins it with the embedding
    eagle3   hidden t = fc(residual sums of three of the target's layers at t)   attention reads norm(embedding) ‖ norm(hidden)

A pair has the rotary position t. While drafting, the drafter's own hidden state takes the place of one
made from the target's features. `eagle` (arXiv 2401.15077) applies the target's head to it directly;
`eagle3` (arXiv 2503.01840) through a norm of its own. The drafter borrows the target's embedding and head;
it cannot change them. Nothing here knows how drafts are made or how a drafter is trained.
"""

from __future__ import annotations

import dataclasses
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
"""The feature of a token tells the token after it. So pair t predicts token t + FIRST_PREDICTED, and the
first tokens of a sequence, before FIRST_PREDICTED, are predicted by no pair."""


def num_predicted(num_prompt: int, num_tokens: int) -> int:
    """Returns how many response tokens pairs predict in a sequence of `num_tokens` that begins with a
    prompt."""
    return num_tokens - max(num_prompt, FIRST_PREDICTED)


def predicts_response(num_prompt: int, start: int, num_tokens: int) -> Tensor:
    """Returns bool[num_tokens - 1]: whether each pair of a window predicts a response token. The window
    holds `num_tokens` tokens with their features, from position `start` of a sequence whose response
    begins at `num_prompt`."""
    predicted = torch.arange(start + FIRST_PREDICTED, start + num_tokens - TOKEN_AHEAD + FIRST_PREDICTED)
    return predicted >= num_prompt


@dataclass(frozen=True)
class Alignment:
    """The places of the pairs of several packed sequences, as indices into their flat tokens and features.

    lengths: pairs of each sequence. Of pair m: `feature_index_M` of its feature, `token_index_M` of the
        token it reads, `positions_M` its rotary position, which starts at 0 in every sequence.
    """

    lengths: tuple[int, ...]
    feature_index_M: Tensor
    token_index_M: Tensor
    positions_M: Tensor

    def ahead(self, num_steps: int) -> tuple[Tensor, Tensor]:
        """Returns (token index, whether it exists) of the pairs after each has drafted `num_steps` times:
        a pair then reads the token that many places further on, and predicts its feature. Beyond a
        sequence's end its last token stands in."""
        lengths_S = torch.tensor(self.lengths, device=self.token_index_M.device)
        last_S = lengths_S.cumsum(0) + torch.arange(len(lengths_S), device=lengths_S.device)
        last_M = torch.repeat_interleave(last_S, lengths_S, output_size=len(self.token_index_M))
        index_M = self.token_index_M + num_steps
        return torch.minimum(index_M, last_M), index_M <= last_M


def align(lengths: Sequence[int], device: torch.device | str = "cpu") -> Alignment:
    """Returns the pairs of sequences packed one after the other; a sequence of n tokens has n - 1 pairs.

    device: that of the indices returned.
    """
    features, positions, start = [], [], 0
    for length in lengths:
        pairs = torch.arange(length - TOKEN_AHEAD, device=device)
        positions.append(pairs)
        features.append(pairs + start)
        start += length
    feature_index = torch.cat(features)
    return Alignment(
        tuple(n - TOKEN_AHEAD for n in lengths),
        feature_index,
        feature_index + TOKEN_AHEAD,
        torch.cat(positions),
    )


@dataclass(frozen=True)
class DrafterShape:
    """The shape of a drafter: everything that its tensors' names and sizes follow from.

    layer: geometry of its one decoder layer, of Llama form; its vocabulary is the target's.
    capture: the target's layers whose inputs it reads at a position; the number of layers stands for the
        features, the output of the final norm.
    draft_vocab_size: how many tokens it can propose. Where these are fewer than the target has, the tensor
        d2t says which.
    owns_head: it brought a head of its own (a foreign drafter); otherwise it uses the rows of the target's
        current head.
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
        """Numbers that the drafter reads of the target at a position."""
        return len(self.capture) * self.layer.hidden_size

    @property
    def is_reduced(self) -> bool:
        return self.draft_vocab_size < self.layer.vocab_size

    @property
    def can_choose(self) -> bool:
        """Whether the tokens to propose can be chosen: a head or a vocabulary of its own leaves no choice."""
        return not (self.owns_head or self.is_reduced)

    @property
    def layer_name(self) -> str:
        """Prefix of the names of the layer's tensors."""
        return "layers.0" if self.method == "eagle" else "midlayer"

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """Names of the norms before attention; EAGLE has none, its attention reads the output of fc as it
        is."""
        return () if self.method == "eagle" else ("input_layernorm", "hidden_norm")

    @property
    def fc_size(self) -> int:
        """Width of the input of fc: embedding and feature, or what all captured layers hold."""
        return 2 * self.layer.hidden_size if self.method == "eagle" else self.feature_size


def drafter_shape(
    target: ModelConfig, method: Method = "eagle", draft_vocab_size: int | None = None
) -> DrafterShape:
    """Returns the shape of a drafter for the target. Its layer has the target's sizes, and Llama's form
    whatever the target's family, because other engines serve no other form."""
    layer = dataclasses.replace(target, architecture="llama", num_layers=1, tie_embeddings=True)
    capture = (target.num_layers,) if method == "eagle" else capture_layers(target.num_layers)
    return DrafterShape(method, layer, capture, draft_vocab_size or target.vocab_size)


def training_capture(config: DrafterShape, num_layers: int) -> tuple[int, ...]:
    """Returns the layers to capture for training (see `Captured`): those that the drafter reads, then the
    target's features, which give the distribution to match. `num_layers`: the target's."""
    return config.capture if config.capture[-1] == num_layers else (*config.capture, num_layers)


@dataclass(frozen=True)
class Captured:
    """Names for the columns of what was captured for training: views of one tensor of M positions, without a
    copy.

        layers of `training_capture`    │ inputs of the layers that the drafter reads │ the target's features │
        views                             read_MF                                       feature_ME

    For `eagle`, which reads the features themselves, both views are the whole tensor.
    """

    read_MF: Tensor
    feature_ME: Tensor

    @classmethod
    def of(cls, columns_MF: Tensor, config: DrafterShape) -> Captured:
        return cls(columns_MF[:, : config.feature_size], columns_MF[:, -config.layer.hidden_size :])


def capture_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns an early, a middle and a late layer, the defaults of vLLM and SGLang; in a short model,
    nearer its ends."""
    if num_layers < 4:
        raise UserError(
            f"an eagle3 drafter reads three layers; this model has only {num_layers}, so use eagle"
        )
    return (2, num_layers // 2, num_layers - 3) if num_layers > 6 else (1, num_layers // 2, num_layers - 1)


class DraftModel(nn.Module):
    """The trainable drafter. `state_dict()` has the names that vLLM's EAGLE loaders read. Neither a draft
    vocabulary nor a head of its own is ever trained."""

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
        """Sets random weights drawn from the seed. fc starts near "pass on the feature" (of the latest
        layer captured), so that training starts near copying. A reduced draft vocabulary starts as the
        lowest ids."""
        randomize_matrices(self, seed)
        size = self.config.layer.hidden_size
        with torch.no_grad():
            self.fc.weight[:, -size:] += torch.eye(size, dtype=self.fc.weight.dtype)
            if self.config.is_reduced:
                self.set_vocabulary(torch.arange(self.config.draft_vocab_size))
        return self

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Sets the tokens that can be proposed. token_ids: int64[draft vocabulary], rising."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids)))
        self.t2d.zero_()[token_ids] = True

    def fuse(self, features_MF: Tensor) -> Tensor:
        """Returns the hidden states [M, E] that stand for what was captured; the first columns of it are
        read (`Captured`)."""
        features_MF = features_MF[..., : self.config.feature_size]
        return features_MF if self.config.method == "eagle" else self.fc(features_MF)

    def forward(
        self, embeddings_ME: Tensor, hidden_ME: Tensor, positions_M: Tensor, attend: Attend
    ) -> Tensor:
        """Returns the drafter's next hidden_ME: its prediction of the features of the tokens that were
        embedded."""
        self._rope = Rope.matching(hidden_ME, self.config.layer, self._rope)
        rope, pair = self._rope.at(positions_M), torch.cat([embeddings_ME, hidden_ME], dim=-1)
        if self.config.method == "eagle":
            hidden: Tensor = self.layers[0](0, self.fc(pair), rope, attend)
        else:
            hidden = self.midlayer(0, hidden_ME, rope, attend, pair)
        return hidden

    def logits(self, hidden_ME: Tensor, head_VE: Tensor) -> Tensor:
        """Returns logits [M, draft vocabulary]; head_VE holds the rows of the draft vocabulary."""
        return F.linear(self.norm(hidden_ME) if self.config.method == "eagle3" else hidden_ME, head_VE)

    def restrict(self, rows_V: Tensor) -> Tensor:
        """Returns those rows of the target's vocabulary that belong to the draft vocabulary."""
        return rows_V[draft_token_ids(self.d2t)] if self.config.is_reduced else rows_V


def draft_token_ids(d2t: Tensor) -> Tensor:
    """Returns the target's id of each draft token; `d2t` holds the differences between the two ids."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def find_mismatch(config: DrafterShape, tensors: Mapping[str, Tensor]) -> str | None:
    """Returns what is wrong with the first tensor, by name, that is missing, unexpected or of another
    shape; None: nothing."""
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
        self.token_ids: Tensor | None = None  # that it can propose; None: all of the target's
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
        """Copies the weights of a drafter. RuntimeError, before anything changes, unless exactly its
        tensors arrive."""
        if (mismatch := find_mismatch(self.config, tensors)) is not None:
            raise RuntimeError(f"drafter: {mismatch}")
        self.fc.load(
            tensors["fc.weight"].detach(), tensors["fc.bias"].detach() if self.config.has_bias else None
        )
        self.layer.load(tensors, self.config.layer_name + ".")
        if self.config.method == "eagle3":
            self.gain_E.copy_(self.norm.load(tensors["norm.weight"].detach()))
        if self.config.is_reduced:
            self.token_ids = draft_token_ids(tensors["d2t"].to(self.device))
        if self.config.owns_head:
            assert self.head is not None
            self.head.load(tensors["lm_head.weight"].detach())
        self.version, self._head_version = version, -1

    @property
    def num_proposed(self) -> int:
        """Tokens that it can propose."""
        return self.config.draft_vocab_size if self.token_ids is None else len(self.token_ids)

    def choose(self, token_ids: Tensor | None) -> None:
        """Sets the tokens that it proposes from now on, rising; None: all. No weight changes: it ranks
        with these rows of the target's head."""
        assert self.config.can_choose, "its folder has fixed them"
        if token_ids is None:
            self.head = None
        elif self.head is None or self.head.shape[0] != len(token_ids):
            self.head = PackedLinear(self.config.layer.hidden_size, len(token_ids), self.dtype, self.device)
        self.token_ids = None if token_ids is None else token_ids.to(self.device)
        self._head_version = -1

    def fuse(self, features_NF: Tensor) -> Tensor:
        """Like `DraftModel.fuse`; so are the two methods below."""
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
        """Returns logits [..., draft vocabulary]; rows borrowed from the target's head are those of its
        current version."""
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

"""Base classes of drafters. The head is borrowed from the target, and never changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.drafter.shape import DrafterShape
from tlt.models.decoder import Linear, RMSNorm, randomize_matrices
from tlt.models.packed import PackedLinear, PackedNorm
from tlt.models.rope import Rope
from tlt.models.target import Target

if TYPE_CHECKING:
    from tlt.models.loops.products import Panels

Embed = Callable[[Tensor], Tensor]
"""Token ids → the target's embeddings, in the drafter's dtype."""


class PackedText(Protocol):
    """captured_NF: the target's captured layers, the drafter's columns first."""

    @property
    def token_ids_N(self) -> Tensor: ...

    @property
    def captured_NF(self) -> Tensor: ...

    @property
    def lengths(self) -> tuple[int, ...]: ...


Anchors = Sequence[Sequence[int]]
"""By sequence, rising token indices."""


class DraftModel(nn.Module, ABC):
    """Its tensors have the names of other engines' loaders. Its own draft vocabulary or head is never
    trained."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterShape) -> None:
        super().__init__()
        self.config = config
        size, vocab = config.layer.hidden_size, config.layer.vocab_size
        self.fc = Linear(config.fc_size, size, bias=config.has_bias)
        if config.has_norm:
            self.norm = RMSNorm(size, config.layer.rms_norm_eps)
        if config.is_reduced:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool))
        if config.owns_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False).requires_grad_(False)
        self._rope: Rope | None = None

    def initialize(self, seed: int) -> DraftModel:
        """fc starts near the identity on the latest captured layer, so that training starts near
        copying it."""
        randomize_matrices(self, seed)
        size = self.config.layer.hidden_size
        with torch.no_grad():
            self.fc.weight[:, -size:] += torch.eye(size, dtype=self.fc.weight.dtype)
            if self.config.is_reduced:
                self.set_vocabulary(torch.arange(self.config.draft_vocab_size))
        return self

    def set_vocabulary(self, token_ids: Tensor) -> None:
        self.d2t.copy_(token_ids - torch.arange(len(token_ids)))
        self.t2d.zero_()[token_ids] = True

    def rope_at(self, like: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        self._rope = Rope.matching(like, self.config.layer, self._rope)
        return self._rope.at(positions_N)

    @abstractmethod
    def predict(self, text: PackedText, anchors: Anchors, embed: Embed) -> Tensor:
        """Hidden states [R, E] that propose the token after each anchor."""

    def bias(self, tokens: Tensor, token_ids: Tensor | None) -> Tensor | None:
        """Returns a bias of the next token's logits, [..., draft vocabulary]. token_ids: the draft
        vocabulary; None: all, or the drafter's own."""
        return None

    def logits(self, hidden_ME: Tensor, head_VE: Tensor) -> Tensor:
        hidden_ME = self.norm(hidden_ME) if self.config.has_norm else hidden_ME
        return self.config.layer.finish_logits(F.linear(hidden_ME, head_VE))

    def rows(self, head_VE: Tensor, token_ids: Tensor | None) -> Tensor:
        if self.config.owns_head:
            return self.lm_head.weight
        return (self.restrict(head_VE) if token_ids is None else head_VE[token_ids]).to(self.fc.weight.dtype)

    def restrict(self, rows_V: Tensor) -> Tensor:
        return rows_V[draft_token_ids(self.d2t)] if self.config.is_reduced else rows_V


def draft_token_ids(d2t: Tensor) -> Tensor:
    """Target ids. d2t: target id minus draft id."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def flatten_anchors(lengths: Sequence[int], anchors: Anchors) -> list[int]:
    found, start = [], 0
    for length, places in zip(lengths, anchors, strict=True):
        found += [start + place for place in places]
        start += length
    return found


class PackedDrafter(ABC):
    """The engine's copy of a drafter, without gradients."""

    model_class: type[DraftModel]

    def __init__(self, config: DrafterShape, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        size = config.layer.hidden_size
        self.fc = PackedLinear(config.fc_size, size, dtype, self.device, has_bias=config.has_bias)
        self.norm = PackedNorm(size, config.layer.rms_norm_eps, dtype, self.device)
        has_rows = config.owns_head or config.is_reduced
        self.head = PackedLinear(size, config.draft_vocab_size, dtype, self.device) if has_rows else None
        self.token_ids: Tensor | None = None  # the draft vocabulary; None: all tokens
        self.rope = Rope(config.layer, dtype, self.device)
        self.version = -1
        self.num_loads = 0  # of weights or vocabularies
        self._head_version = -1

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Raises RuntimeError, before any change, if a tensor is missing, unexpected or of another shape."""
        with torch.device("meta"):
            expected = self.model_class(self.config)
        if (mismatch := find_mismatch(expected, tensors)) is not None:
            raise RuntimeError(f"drafter: {mismatch}")
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.fc.load(tensors["fc.weight"], tensors.get("fc.bias"))
        if self.config.has_norm:
            self.norm.load(tensors["norm.weight"])
        if self.config.is_reduced:
            self.token_ids = draft_token_ids(tensors["d2t"].to(self.device))
        if self.config.owns_head:
            assert self.head is not None
            self.head.load(tensors["lm_head.weight"])
        self.load_layers(tensors)
        self.version, self._head_version = version, -1
        self.num_loads += 1

    @abstractmethod
    def load_layers(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads this form's tensors; `load` has checked them."""

    @property
    def num_proposed(self) -> int:
        return self.config.draft_vocab_size if self.token_ids is None else len(self.token_ids)

    def choose(self, token_ids: Tensor | None) -> None:
        """token_ids: ascending; None: all."""
        assert self.config.can_choose, "its folder fixes them"
        if token_ids is None:
            self.head = None
        elif self.head is None or self.head.shape[0] != len(token_ids):
            self.head = PackedLinear(self.config.layer.hidden_size, len(token_ids), self.dtype, self.device)
        self.token_ids = None if token_ids is None else token_ids.to(self.device)
        self._head_version = -1
        self.num_loads += 1

    @abstractmethod
    def predict(self, text: PackedText, anchors: Anchors, embed: Embed) -> Tensor:
        """See `DraftModel.predict`."""

    def bias(self, tokens: Tensor) -> Tensor | None:
        return None

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """[..., draft vocabulary]; borrowed rows follow the target's current head."""
        if self.config.has_norm:
            hidden = self.norm(hidden)
        if (head := self._current_head(target)) is None:
            return target.logits(hidden)
        products_MV = head(hidden.reshape(-1, hidden.shape[-1]))
        return self.config.layer.finish_logits(products_MV).view(*hidden.shape[:-1], -1)

    def head_panels(self, target: Target) -> Panels | None:
        head, layer = self._current_head(target), self.config.layer
        if layer.head_scale != 1.0 or layer.head_softcap is not None:
            return None
        return target.head_panels if head is None else head.panels

    def _current_head(self, target: Target) -> PackedLinear | None:
        if self.head is None or self.config.owns_head or self._head_version == target.version:
            return self.head
        self.head.load(target.head_VE[self.token_ids])
        self._head_version = target.version
        return self.head


def find_mismatch(model: DraftModel, tensors: Mapping[str, Tensor]) -> str | None:
    """Returns an error text for the first tensor that is missing, unexpected or of another shape, or None.
    The model may be on the meta device."""
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() | tensors.keys()):
        found = list(tensors[name].shape) if name in tensors else "missing"
        wanted = list(expected[name]) if name in expected else "no such tensor"
        if found != wanted:
            return f"tensor {name} is {found}, expected was {wanted}"
    return None

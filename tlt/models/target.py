"""A policy's copy for inference: packed.py is the fast one, any.py the general one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.models.attention_form import PLAIN, AttentionForm
from tlt.models.decoder import ModelConfig

if TYPE_CHECKING:
    from tlt.models.loops.products import Panels


class AttendInForm(Protocol):
    """See `decoder.Attend`."""

    def __call__(self, layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor: ...


class Target:
    """`version` is the number of the loaded policy, -1 before the first."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    version: int = -1
    embedding_VE: Tensor
    head_VE: Tensor
    is_recordable = False
    """Whether a forward launches the same kernels for the same shapes, and waits for nothing (graphs.py)."""
    num_routes: int = 0
    """Experts that a token takes in all layers."""
    records_routes: bool = False
    """Whether `forward_capturing` appends them, in the captured features' dtype."""

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Raises KeyError for a missing tensor, RuntimeError for another shape."""
        self.load_parts([tensors], version)

    def load_parts(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """Parts come in any order, and none is kept. All tensors of a layer are in one part."""
        raise NotImplementedError

    def forward_capturing(
        self, token_ids_N: Tensor, positions_N: Tensor, attend: AttendInForm, capture: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Returns (features_NE, captured_NF). Captured are the inputs of the layers in `capture`, residual
        sums before any norm; of the number of layers, or an empty `capture`, the features."""
        raise NotImplementedError

    @contextmanager
    def recording(self, is_on: bool) -> Iterator[None]:
        """Appends routes only for the caller: a drafter's training calls the model, too."""
        self.records_routes = is_on
        try:
            yield
        finally:
            self.records_routes = False

    def embed(self, token_ids: Tensor) -> Tensor:
        """Drafters read the embedding without the factor of the target's first layer (Gemma's √E, Granite's
        multiplier), as in vLLM."""
        return F.embedding(token_ids, self.embedding_VE)

    def logits(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def head_panels(self) -> Panels | None:
        """The head's matrix for compiled loops; None: `logits` are no plain products."""
        return None

    @cached_property
    def unsound_V(self) -> Tensor | None:
        """bool[V]: tokens whose embedding is not finite, such as padding that is never sampled; None: there
        are none. No draft may contain one: its cache entries would spoil the results of earlier tokens."""
        if torch.stack(self.embedding_VE.aminmax()).isfinite().all():
            return None
        return ~self.embedding_VE.isfinite().all(dim=1)

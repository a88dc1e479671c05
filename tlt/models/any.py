"""Any decoder of transformers, for the update and for the engine.

transformers' modeling file ── q, k, v of a layer ──▶ attention(…, attend) ──▶ attention over our caches
embedding, rotary positions, norms, MLPs, routers     scale, window, softcap, sinks: attention_form.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers import __version__ as version

from tlt.base.types import UserError
from tlt.models.any_config import AnyConfig
from tlt.models.any_equal import Matrix, put_matrices
from tlt.models.attention import PackedCausal
from tlt.models.attention_form import PLAIN, AttentionForm
from tlt.models.decoder import Policy, Reader, given
from tlt.models.routing import Routing, watch_routers
from tlt.models.target import AttendInForm, Target

_NAME = "tlt"


class AnyTransformer(Policy):
    """Trainable, with the names of transformers' module; a tied head has no entry."""

    config: AnyConfig

    def __init__(
        self, config: AnyConfig, dtype: torch.dtype = torch.float32, checkpoints_activations: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        module = AutoModelForCausalLM.from_config(
            config.for_transformers(),
            dtype=dtype,
            attn_implementation=_NAME,
            experts_implementation="eager" if dtype == torch.float64 else None,  # grouped products lack it
        ).eval()
        self._unregistered: tuple[PreTrainedModel] = (module,)  # its children are
        prefix = module.base_model_prefix
        self.stack_name = (
            prefix if hasattr(module, prefix) else "model"
        )  # Llama 4's prefix is the whole model's
        self.add_module(self.stack_name, getattr(module, self.stack_name))
        self.lm_head = None if config.tie_embeddings else module.get_output_embeddings()
        self.initialize_buffers(torch.get_default_device())
        self.route_shape = watch_routers([*self.layers])
        if checkpoints_activations:
            for layer in self.layers:
                layer.forward = _checkpointed(layer.forward)

    def initialize_buffers(self, device: torch.device) -> None:
        """Rotary frequencies, scales of embeddings."""
        module = self.module
        stored = self.state_dict().keys()
        for path, part in self.named_modules():
            prefix = f"{path}." if path else ""
            names = [name for name, _ in part.named_buffers(recurse=False) if prefix + name not in stored]
            with torch.device("cpu"), torch.no_grad():
                for name in names:
                    setattr(part, name, torch.full_like(getattr(part, name), math.nan, device="cpu"))
                if names:
                    module._init_weights(part)
            for name in names:
                buffer = getattr(part, name)
                assert buffer.isfinite().all(), f"transformers' _init_weights leaves {prefix}{name} as it was"
                setattr(part, name, buffer.to("cpu" if device.type == "meta" else device))

    @property
    def module(self) -> PreTrainedModel:
        return self._unregistered[0]

    @property
    def stack(self) -> nn.Module:
        stack: nn.Module = getattr(self, self.stack_name)
        return stack

    @property
    def layers(self) -> nn.ModuleList:
        layers = self.stack.layers
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def embedding(self) -> nn.Embedding:
        embedding = self.stack.embed_tokens
        assert isinstance(embedding, nn.Embedding)
        return embedding

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        attend: AttendInForm,
        read: Reader | None = None,
        inputs: Sequence[Tensor] = (),
        routing: Routing | None = None,
    ) -> Any:
        if self.config.is_hybrid and isinstance(attend, PackedCausal):
            assert attend.num_sequences == 1, "a state would go on from one sequence to the next"
        if self.config.mixes_heads:
            attend = _with_largest_heads(attend, self.config)
        with _before_layers(zip(self.layers, map(_give, inputs), strict=False)):
            found = self.stack(
                input_ids=token_ids_N[None],
                position_ids=positions_N[None],
                use_cache=False,
                attend=attend,
                routing=routing,
            )
        features_NE: Tensor = found.last_hidden_state[0]
        if inputs:
            features_NE = given(features_NE, inputs[-1])
        return features_NE if read is None else read(features_NE)

    def forward_capturing(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        attend: AttendInForm,
        capture: Sequence[int],
        routing: Routing | None = None,
    ) -> tuple[Tensor, Tensor]:
        captured: dict[int, Tensor] = {}
        kept = [index for index in capture if index < len(self.layers)]
        with _before_layers((self.layers[index], _keep_input(captured, index)) for index in kept):
            features_NE = self(token_ids_N, positions_N, attend, routing=routing)
        captured[len(self.layers)] = features_NE
        return features_NE, torch.cat([captured[i] for i in capture or (len(self.layers),)], dim=-1)

    def logits(self, features: Tensor) -> Tensor:
        return self.config.finish_logits(F.linear(features, self.head_weight))


def _with_largest_heads(attend: AttendInForm, config: AnyConfig) -> AttendInForm:
    """Attention over a cache whose layers have one shape: zeros fill a head, and a kv head is repeated.
    Scores and sums stay the same."""
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim

    def attended(layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        num_tokens, num_all, head_dim = qkv_NSD.shape
        num_kv_heads = (num_all - H) // 2
        q_NHD, k_NKD, v_NKD = qkv_NSD.split([H, num_kv_heads, num_kv_heads], dim=1)
        k_NKD, v_NKD = (x.repeat_interleave(K // num_kv_heads, dim=1) for x in (k_NKD, v_NKD))
        filled_NSD = F.pad(torch.cat([q_NHD, k_NKD, v_NKD], dim=1), (0, D - head_dim))
        scale = head_dim**-0.5 if form.scale is None else form.scale
        out_NC = attend(layer, filled_NSD, replace(form, scale=scale))
        return out_NC.view(num_tokens, H, D)[..., :head_dim].flatten(1)

    return attended


def _checkpointed(forward: Any) -> Any:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return checkpointed


@contextmanager
def _before_layers(hooks: Iterable[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles = [layer.register_forward_pre_hook(hook) for layer, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep_input(captured: dict[int, Tensor], index: int) -> Any:
    def keep(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        captured[index] = inputs[0][0]

    return keep


def _give(x_NE: Tensor) -> Any:
    def give(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return given(inputs[0], x_NE[None]), *inputs[1:]

    return give


class AnyTarget(Target):
    """borrows: whether parameters of this dtype and device are the policy's own memory."""

    def __init__(
        self,
        config: AnyConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        borrows: bool = False,
        equal_rows: bool = False,
    ) -> None:
        self.config, self.dtype, self.device, self.borrows = config, dtype, torch.device(device), borrows
        with torch.device("meta"):
            self.model = AnyTransformer(config, dtype)
        self.matrices: dict[str, Matrix] = {}
        self.head: Matrix | None = None
        if equal_rows:
            self.matrices = put_matrices(self.model, config.family, self.model.lm_head)
            self.head = Matrix(self.model.head_weight)
        if not borrows:
            self.model.to_empty(device=self.device)
        self.model.requires_grad_(False).initialize_buffers(self.device)
        self.embedding_VE, self.head_VE = self.model.embedding.weight, self.model.head_weight
        self.num_routes = math.prod(self.model.route_shape)

    @torch.no_grad()
    def load_parts(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> None:
        own = {**self.model.state_dict(keep_vars=True), **self.matrices}
        missing = set(own)
        for part in parts:
            for name, weight in part.items():
                if weight.shape != own[name].shape:
                    wanted = list(own[name].shape)
                    raise RuntimeError(f"{name} has shape {list(weight.shape)} where {wanted} is expected")
                if self.borrows and name not in self.matrices:
                    own[name].data = weight.detach().to(self.device, self.dtype)
                else:
                    own[name].copy_(weight.detach())
                missing.discard(name)
            del part  # before the next one is made
        if missing:
            raise KeyError(min(missing))
        if self.head is not None:
            self.head.copy_(self.head_VE)
        self.version = version
        vars(self).pop("unsound_V", None)

    def forward_capturing(
        self, token_ids_N: Tensor, positions_N: Tensor, attend: AttendInForm, capture: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        if not self.records_routes:
            return self.model.forward_capturing(token_ids_N, positions_N, attend, capture)
        routing = Routing()
        features_NE, captured_NF = self.model.forward_capturing(
            token_ids_N, positions_N, attend, capture, routing
        )
        return features_NE, torch.cat([captured_NF, routing.found_NRK.flatten(1).to(captured_NF)], dim=1)

    def logits(self, features: Tensor) -> Tensor:
        if self.head is None:
            return self.model.logits(features)
        return self.config.finish_logits(self.head.multiply(features))


# ── attention, as transformers calls it ─────────────────────────────────────────────────────────────────────


_FORM = ("scaling", "sliding_window", "softcap", "s_aux")
_IGNORED = frozenset(("position_ids", "use_cache", "routing"))
"""What attention's arguments hold beside its form: rotated queries and keys know their positions."""


def _attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: AttendInForm,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Returns [1, N, H, D]. Raises UserError for arguments that are neither of the form nor ignored."""
    assert attention_mask is None, "a mask is made only for implementations that transformers knows"
    given = {name: value for name, value in arguments.items() if value is not None}
    assert given.pop("dropout", 0.0) == 0.0, "for_transformers sets it"
    scaling, sliding_window, softcap, sinks_H = (given.pop(name, None) for name in _FORM)
    if unknown := sorted(given.keys() - _IGNORED):
        what = f"{type(module).__name__} asks attention for {', '.join(unknown)}, which is not computed here"
        remedy = "use an older transformers"
        raise UserError(f"transformers {version}: {what}; {remedy}")
    _, num_heads, num_tokens, head_dim = query_1HND.shape
    known = _form(scaling, sliding_window, softcap, head_dim)
    if sinks_H is not None:
        known = replace(known, sinks_H=sinks_H)
    qkv_NSD = torch.cat([query_1HND[0], key_1KND[0], value_1KND[0]]).transpose(0, 1)
    out_NC = attend(module.layer_idx, qkv_NSD, known)  # type: ignore[arg-type]
    return out_NC.view(1, num_tokens, num_heads, head_dim), None


@lru_cache
def _form(scaling: float | None, window: int | None, softcap: float | None, head_dim: int) -> AttentionForm:
    is_usual = scaling is None or math.isclose(scaling, head_dim**-0.5, rel_tol=1e-12)
    if is_usual and window is None and softcap is None:
        return PLAIN
    return AttentionForm(None if is_usual else scaling, window, softcap)


AttentionInterface.register(_NAME, _attention)

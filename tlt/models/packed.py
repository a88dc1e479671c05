"""The engine's copy of a decoder: projections of the same input are one matrix; on a CPU, all layers are one
call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.models.decoder import INPUT_NORM, Attend, ModelConfig, run_layer
from tlt.models.loops import available
from tlt.models.rope import Rope
from tlt.models.target import Target

if TYPE_CHECKING:
    from tlt.models.loops.products import Panels

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LAYER_PREFIX = re.compile(r"model\.layers\.\d+\.")


class PackedNorm:
    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.eps = size, eps
        self.weight = torch.ones(size, dtype=dtype, device=device)

    def load(self, weight_E: Tensor) -> None:
        self.weight.copy_(weight_E)

    def __call__(self, x_NE: Tensor) -> Tensor:
        return F.rms_norm(x_NE, (self.size,), self.weight, self.eps)


class PackedLinear:
    """y = x Wᵀ + bias. On a CPU it has panels alone (loops/products.py)."""

    has_panels = True

    def __init__(
        self,
        num_in: int,
        num_out: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_bias: bool = False,
        storage: Tensor | None = None,
        borrows: bool = False,
    ) -> None:
        """storage: memory that already holds the matrix. borrows: whether `load` keeps a fitting weight
        without a copy."""
        self.borrows, self.device, self.dtype = borrows, device, dtype
        self.shape = (num_out, num_in)
        self.panels = available.panels(num_in, num_out, dtype, device) if self.has_panels else None
        self.weight: Tensor | None = None
        if self.panels is None:
            self.weight = _allocate(num_out, num_in, dtype, device, borrows) if storage is None else storage
        self.bias = torch.empty(num_out, dtype=dtype, device=device) if has_bias else None

    def load(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [num_out, num_in], of any floating dtype. Raises RuntimeError for another shape."""
        if tuple(weight.shape) != self.shape:
            raise RuntimeError(
                f"a matrix of shape {list(weight.shape)} arrived where {list(self.shape)} was expected"
            )
        if self.panels is not None:
            self.panels.load(weight)
        elif self.weight is not weight:
            assert self.weight is not None
            self.weight = _place(weight, self.weight, self.borrows)
        if self.bias is not None:
            assert bias is not None
            self.bias.copy_(bias)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self.panels is not None:
            return self.panels.multiply(x_NI, self.bias)
        assert self.weight is not None
        return F.linear(x_NI, self.weight, self.bias)

    def add_to(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        if self.panels is not None:
            return self.panels.multiply(x_NI, residual_NO)
        assert self.weight is not None
        return torch.addmm(residual_NO, x_NI, self.weight.t())


class PackedLayer:
    norm_type, linear_type = PackedNorm, PackedLinear

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        norms: Sequence[str] = INPUT_NORM,
        borrows: bool = False,
    ) -> None:
        c = self.config = config
        norm, linear = self.norm_type, self.linear_type
        self.num_rotated = c.num_heads + c.num_kv_heads
        self.input_norms = {name: norm(c.hidden_size, c.rms_norm_eps, dtype, device) for name in norms}
        num_read, num_attended = max(len(norms), 1) * c.hidden_size, c.num_heads * c.head_dim
        self.mlp_norm = norm(c.hidden_size, c.rms_norm_eps, dtype, device)
        self.qkv_linear = linear(num_read, c.num_qkv * c.head_dim, dtype, device, has_bias=c.qkv_bias)
        self.qk_norm_weight: Tensor | None = None
        if c.qk_norm:
            self.qk_norm_weight = torch.empty(self.num_rotated, c.head_dim, dtype=dtype, device=device)
        self.output_linear = linear(num_attended, c.hidden_size, dtype, device, borrows=borrows)
        self.gate_up_linear = linear(c.hidden_size, 2 * c.intermediate_size, dtype, device)
        self.down_linear = linear(c.intermediate_size, c.hidden_size, dtype, device, borrows=borrows)

    def load(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Raises KeyError for a missing tensor."""
        c, device = self.config, self.qkv_linear.device

        def given(name: str) -> Tensor:
            return tensors[prefix + name].detach()

        def cat(*names: str) -> Tensor:  # on the device: a GPU joins and scales far faster than a CPU
            return torch.cat([given(name).to(device) for name in names])

        for name, norm in self.input_norms.items():
            norm.load(given(f"{name}.weight"))
        bias = cat(*(f"self_attn.{name}_proj.bias" for name in "qkv")) if c.qkv_bias else None
        self.qkv_linear.load(cat(*(f"self_attn.{name}_proj.weight" for name in "qkv")), bias)
        if self.qk_norm_weight is not None:
            q, k = (given(f"self_attn.{name}_norm.weight") for name in "qk")
            self.qk_norm_weight.copy_(torch.stack([q] * c.num_heads + [k] * c.num_kv_heads))
        self.output_linear.load(given("self_attn.o_proj.weight"))
        self.mlp_norm.load(given("post_attention_layernorm.weight"))
        self.gate_up_linear.load(cat("mlp.gate_proj.weight", "mlp.up_proj.weight"))
        self.down_linear.load(given("mlp.down_proj.weight"))

    def qkv(self, read_NI: Tensor) -> Tensor:
        norms = self.input_norms.values()
        if len(norms) == 1:
            (norm,) = norms
            read_NI = norm(read_NI)
        elif norms:
            parts = zip(norms, read_NI.chunk(len(norms), dim=-1), strict=True)
            read_NI = torch.cat([norm(part) for norm, part in parts], dim=-1)
        qkv_NSD = self.qkv_linear(read_NI).view(-1, self.config.num_qkv, self.config.head_dim)
        if self.qk_norm_weight is not None:
            self.norm_heads(qkv_NSD[:, : self.num_rotated], self.qk_norm_weight)
        return qkv_NSD

    def norm_heads(self, qk_NHD: Tensor, weight_HD: Tensor) -> None:
        size, eps = self.config.head_dim, self.config.rms_norm_eps
        torch.mul(F.rms_norm(qk_NHD, (size,), None, eps), weight_HD, out=qk_NHD)

    def add_attention(self, x_NE: Tensor, attended_NA: Tensor) -> Tensor:
        return self.output_linear.add_to(x_NE, attended_NA)

    def add_mlp(self, x_NE: Tensor) -> Tensor:
        gate_NF, up_NF = self.gate_up_linear(self.mlp_norm(x_NE)).chunk(2, dim=-1)
        return self.down_linear.add_to(x_NE, F.silu(gate_NF).mul_(up_NF))


class PackedTransformer(Target):
    """borrows: whether unchanged tensors (embedding, head, output and down projections; with panels the
    embedding alone) are the policy's own memory, if dtype and device agree. Training changes them here
    too: load the policy again before use.
    """

    is_recordable = True
    layer_type = PackedLayer

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        borrows: bool = False,
    ) -> None:
        self.config, self.dtype, self.device, self.borrows = config, dtype, torch.device(device), borrows
        self.layers = [
            self.layer_type(config, dtype, self.device, borrows=borrows) for _ in range(config.num_layers)
        ]
        self.embedding_VE = _allocate(config.vocab_size, config.hidden_size, dtype, self.device, borrows)
        self.head_VE = self.embedding_VE if config.tie_embeddings else torch.empty_like(self.embedding_VE)
        self.head_linear = self.layer_type.linear_type(
            config.hidden_size, config.vocab_size, dtype, self.device, storage=self.head_VE, borrows=borrows
        )
        self.final_norm = self.layer_type.norm_type(
            config.hidden_size, config.rms_norm_eps, dtype, self.device
        )
        self.rope = Rope(config, dtype, self.device)
        self.compiled = available.compile_layers(self.config, self.layers, self.final_norm)

    @torch.no_grad()
    def load_parts(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> None:
        missing = {f"model.layers.{index}." for index in range(len(self.layers))} | {EMBEDDING, FINAL_NORM}
        missing |= set() if self.config.tie_embeddings else {HEAD}
        for part in parts:
            missing -= self._load_part(part)
            del part  # before the next one is made
        if missing:
            raise KeyError(min(missing))
        self.version = version
        if self.compiled is not None:
            self.compiled.loaded()
        vars(self).pop("unsound_V", None)  # cached, of the old embedding

    def _load_part(self, part: Mapping[str, Tensor]) -> set[str]:
        prefixes = {match.group() for name in part if (match := LAYER_PREFIX.match(name)) is not None}
        for index, layer in enumerate(self.layers):
            if f"model.layers.{index}." in prefixes:
                layer.load(part, f"model.layers.{index}.")
        if EMBEDDING in part:
            self.embedding_VE = _place(part[EMBEDDING], self.embedding_VE, self.borrows)
        if self.config.tie_embeddings and EMBEDDING in part:
            self.head_VE = self.embedding_VE
            self.head_linear.load(self.head_VE)
        elif not self.config.tie_embeddings and HEAD in part:
            self.head_VE = _place(part[HEAD], self.head_VE, self.borrows)
            self.head_linear.load(self.head_VE)
        if FINAL_NORM in part:
            self.final_norm.load(part[FINAL_NORM].detach())
        return prefixes | {name for name in (EMBEDDING, HEAD, FINAL_NORM) if name in part}

    def forward(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        return self.forward_capturing(token_ids_N, positions_N, attend, ())[0]

    def forward_capturing(
        self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend, capture: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        x_NE = F.embedding(token_ids_N, self.embedding_VE)
        rope = self.rope.at(positions_N)
        if self.compiled is not None and self.compiled.serves(attend):
            return self.compiled.run(x_NE, rope, attend, capture)
        captured = {}
        for index, layer in enumerate(self.layers):
            if index in capture:
                captured[index] = x_NE
            x_NE = run_layer(layer, index, x_NE, rope, attend)
        features_NE = self.final_norm(x_NE)
        captured[len(self.layers)] = features_NE
        if len(capture) < 2:
            return features_NE, captured[capture[0]] if capture else features_NE
        return features_NE, torch.cat([captured[index] for index in capture], dim=-1)

    def logits(self, features: Tensor) -> Tensor:
        return self.head_linear(features.view(-1, self.config.hidden_size)).view(*features.shape[:-1], -1)

    @property
    def head_panels(self) -> Panels | None:
        return self.head_linear.panels


def layer_by_layer(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yields a part per layer, and per tensor outside of the layers, read when it is asked for."""

    def part_of(name: str) -> str:
        return ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else name

    for _, names in groupby(tensors, part_of):
        yield {name: tensors[name] for name in names}


def _allocate(
    num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device, borrows: bool
) -> Tensor:
    return torch.empty(0 if borrows else num_rows, num_columns, dtype=dtype, device=device)


def _place(given: Tensor, known: Tensor, borrows: bool) -> Tensor:
    """Borrowed memory is never written to."""
    return given.detach().to(known) if borrows else known.copy_(given.detach())

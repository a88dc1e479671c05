"""One decoder for the Llama, Qwen2 and Qwen3 families: training, prefill, decode and tree verification.

Every caller runs the same code on a flat batch of N tokens; who may look at whom is the business of the `Attend`
callable that comes in as an argument, so this file knows neither caches nor masks:

    token_ids_N ─ embed ─▶ x_NE ─▶ [ qkv ─ rope ─ attend ─ + ─ mlp ─ + ] × layers ─▶ norm ─▶ features_NE ─ head ─▶ logits_NV

Two classes hold the weights of that one computation. `Transformer` is the trainable module; its parameters are separate
and carry Hugging Face's names. `PackedTransformer` is the engine's: projections that read the same input are one
matrix, and the weights of the norms are folded into the matrices behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Architecture = Literal["llama", "qwen2", "qwen3"]

Attend = Callable[[int, Tensor], Tensor]
"""(layer index, rotated qkv_NSD with S = H + 2K) -> attention output_N(HD)"""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (Hugging Face rope type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. `max_positions` is the window: prompt and response together."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 4096
    tie_embeddings: bool = False

    @property
    def qkv_bias(self) -> bool:
        return self.architecture == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "qwen3"

    @property
    def num_qkv(self) -> int:
        """S: rows of heads in a fused projection, queries first, then keys, then values."""
        return self.num_heads + 2 * self.num_kv_heads


# ── positions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rope_inverse_frequencies(config: ModelConfig) -> Tensor:
    """float64[D/2]. With llama3 scaling, long wavelengths are stretched and the middle band is interpolated
    (the rule published with Llama 3.1)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu") / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


class Rope:
    """Cosines and signed sines for every position of the window: rotate(x) = x·cos + roll(x, D/2)·sin."""

    def __init__(self, config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64, device="cpu"), rope_inverse_frequencies(config))
        sin = angles.sin()
        self.cos_P1D = torch.cat([angles.cos()] * 2, dim=-1)[:, None].to(device=device, dtype=dtype)
        self.sin_P1D = torch.cat([-sin, sin], dim=-1)[:, None].to(device=device, dtype=dtype)

    def at(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos_P1D[positions_N], self.sin_P1D[positions_N]


def apply_rope(qkv_NSD: Tensor, num_rotated: int, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Rotates the query and key heads; without autograd in place, so that keys and values stay one tensor."""
    qk = qkv_NSD[:, :num_rotated]
    rolled = qk.roll(qk.shape[-1] // 2, -1)
    if torch.is_grad_enabled():
        rotated = torch.addcmul(qk * cos_N1D, rolled, sin_N1D)
        return torch.cat([rotated, qkv_NSD[:, num_rotated:]], dim=1)
    torch.addcmul(qk * cos_N1D, rolled, sin_N1D, out=qk)
    return qkv_NSD


# ── the computation, once ────────────────────────────────────────────────────────────────────────────────────────────


class Layer(Protocol):
    """One decoder layer as three residual steps; trainable and packed layers both have this shape."""

    num_rotated: int

    def qkv(self, read_NI: Tensor) -> Tensor: ...
    def add_attention(self, x_NE: Tensor, attended_NA: Tensor) -> Tensor: ...
    def add_mlp(self, x_NE: Tensor) -> Tensor: ...


def run_layer(
    layer: Layer, index: int, x_NE: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, read_NI: Tensor | None = None
) -> Tensor:
    """x_NE: the residual stream.  read_NI: what attention reads, where that is more than the stream (EAGLE-3's drafter)."""
    qkv_NSD = apply_rope(layer.qkv(x_NE if read_NI is None else read_NI), layer.num_rotated, *rope)
    x_NE = layer.add_attention(x_NE, attend(index, qkv_NSD))
    return layer.add_mlp(x_NE)


# ── trainable ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _OneDnnProduct(torch.autograd.Function):
    """x Wᵀ whose forward and input gradient run oneDNN's kernel. The weight's gradient, a product of two activations, was not
    faster there and stays with the BLAS (docs/log.md)."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return _onednn(x_NI, weight_OI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        (gradient_NO,) = gradients
        input_gradient = _onednn(gradient_NO, weight_OI.t().contiguous()) if ctx.needs_input_grad[0] else None
        weight_gradient = gradient_NO.t() @ x_NI if ctx.needs_input_grad[1] else None
        return input_gradient, weight_gradient


def _onednn(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI.contiguous(), packed, None, "none", [], "")
    return product


_MIN_ROWS = 256
"""Rows from which laying a weight out anew for every product pays (CPU, float32)."""


class Linear(nn.Linear):
    """nn.Linear; on a CPU in float32 with many rows twice as fast (see PackedLinear)."""

    def forward(self, x_NI: Tensor) -> Tensor:
        is_fast = x_NI.dtype == torch.float32 and x_NI.device.type == "cpu" and len(x_NI) >= _MIN_ROWS
        if not (is_fast and torch.backends.mkldnn.is_available()):
            return super().forward(x_NI)
        product: Tensor = _OneDnnProduct.apply(x_NI, self.weight)  # type: ignore[no-untyped-call]  # apply has no types in torch
        return product if self.bias is None else product + self.bias


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, input_size: int) -> None:
        super().__init__()
        c = config
        self.shape = (-1, c.num_qkv, c.head_dim)
        self.num_heads, self.num_kv_heads = c.num_heads, c.num_kv_heads
        self.q_proj = Linear(input_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(input_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(input_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.has_qk_norm = c.qk_norm

    def qkv(self, h_NE: Tensor) -> Tensor:
        qkv_NSD = torch.cat([self.q_proj(h_NE), self.k_proj(h_NE), self.v_proj(h_NE)], dim=-1).view(self.shape)
        if not self.has_qk_norm:
            return qkv_NSD
        q, k, v = qkv_NSD.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=1)


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, h_NE: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(h_NE)) * self.up_proj(h_NE))
        return down


INPUT_NORM = ("input_layernorm",)


class DecoderLayer(nn.Module):
    """Pre-norm attention and gated MLP. Attention reads one vector per name in `norms`, each with a norm of that name;
    without names it reads its input raw (EAGLE's drafter)."""

    def __init__(self, config: ModelConfig, *, norms: Sequence[str] = INPUT_NORM) -> None:
        super().__init__()
        self.self_attn = Attention(config, max(len(norms), 1) * config.hidden_size)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.norm_names = tuple(norms)
        for name in norms:
            self.add_module(name, RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.num_rotated = config.num_heads + config.num_kv_heads

    def qkv(self, read_NI: Tensor) -> Tensor:
        if not self.norm_names:
            return self.self_attn.qkv(read_NI)
        parts = read_NI.chunk(len(self.norm_names), dim=-1)
        normed = [getattr(self, name)(part) for name, part in zip(self.norm_names, parts, strict=True)]
        return self.self_attn.qkv(normed[0] if len(normed) == 1 else torch.cat(normed, dim=-1))

    def add_attention(self, x_NE: Tensor, attended_NA: Tensor) -> Tensor:
        added: Tensor = x_NE + self.self_attn.o_proj(attended_NA)
        return added

    def add_mlp(self, x_NE: Tensor) -> Tensor:
        added: Tensor = x_NE + self.mlp(self.post_attention_layernorm(x_NE))
        return added


class DecoderStack(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """The trainable decoder. `state_dict()` has exactly the names of the Hugging Face checkpoint; a tied head has no
    entry of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderStack(config)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rope: Rope | None = None

    def initialize(self, seed: int, std: float = 0.02) -> Transformer:
        """Random weights that depend on the seed alone: normal matrices, unit norms, zero biases."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.copy_(noise * std)
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
        return self

    @property
    def head_weight(self) -> Tensor:
        """[V, E]"""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Features_NE: the output of the final norm, what the head and the drafter read."""
        x_NE = self.model.embed_tokens(token_ids_N)
        if self._rope is None or self._rope.cos_P1D.dtype != x_NE.dtype or self._rope.cos_P1D.device != x_NE.device:
            self._rope = Rope(self.config, self.config.max_positions, x_NE.dtype, x_NE.device)
        rope = self._rope.at(positions_N)
        for index, layer in enumerate(self.model.layers):
            x_NE = run_layer(layer, index, x_NE, rope, attend)  # type: ignore[arg-type]  # ModuleList yields Module
        features: Tensor = self.model.norm(x_NE)
        return features

    def logits(self, features_NE: Tensor) -> Tensor:
        return F.linear(features_NE, self.head_weight)


# ── packed for inference ─────────────────────────────────────────────────────────────────────────────────────────────


class PackedNorm:
    """x / sqrt(mean(x²) + eps). In float32 and float64 the weight is folded into the next matrix, together with the
    factor sqrt(E): three small kernels are left, where F.rms_norm takes seven on a CPU. In bf16, where folding would
    round the weights once more, F.rms_norm runs as it is."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.eps = size, eps
        self.is_folded = dtype in (torch.float32, torch.float64)
        self.floor = torch.tensor(math.sqrt(size * eps), dtype=dtype, device=device)
        self.weight = torch.ones(size, dtype=dtype, device=device)

    def load(self, weight_E: Tensor) -> Tensor:
        """Returns what the rows of the next matrix are to be multiplied with (wider than the weights' own dtype)."""
        self.weight.copy_(weight_E)
        return weight_E.double() * math.sqrt(self.size) if self.is_folded else torch.ones_like(weight_E).double()

    def __call__(self, x_NE: Tensor) -> Tensor:
        if not self.is_folded:
            return F.rms_norm(x_NE, (self.size,), self.weight, self.eps)
        return x_NE / torch.hypot(torch.linalg.vector_norm(x_NE, dim=-1, keepdim=True), self.floor)


_MIN_PRODUCTS = 320_000
"""Multiplications of a product from which oneDNN is faster than the BLAS behind F.linear (docs/log.md)."""


class PackedLinear:
    """A frozen matrix, y = x Wᵀ + bias. On a CPU in float32, large products run oneDNN's kernel on a copy of the matrix in
    oneDNN's own layout: twice as fast as MKL, which keeps to AVX2 on processors that are not Intel's. A matrix so large
    that all its products are large exists in that layout alone."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_bias: bool = False,
        storage: Tensor | None = None,
    ) -> None:
        """storage: the matrix lies here already, for others to read, and is not copied where its own layout serves."""
        self.shape = (num_out, num_in)
        self.can_pack = dtype == torch.float32 and device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.is_always_packed = self.can_pack and num_in * num_out >= _MIN_PRODUCTS
        self.weight: Tensor | None = None
        if not self.is_always_packed:
            self.weight = torch.empty(num_out, num_in, dtype=dtype, device=device) if storage is None else storage
        self.weight_t = None if self.weight is None else self.weight.t()
        self.packed: Tensor | None = None
        self.bias = torch.empty(num_out, dtype=dtype, device=device) if has_bias else None

    def load(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copies [num_out, num_in] in, of any floating type; RuntimeError for another shape."""
        if tuple(weight.shape) != self.shape:
            raise RuntimeError(f"a matrix of shape {list(weight.shape)} arrived where {list(self.shape)} was expected")
        if self.weight is not None and self.weight is not weight:
            self.weight.copy_(weight)
        if self.can_pack:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous())
        if self.bias is not None:
            assert bias is not None
            self.bias.copy_(bias)

    def _runs_packed(self, x_NI: Tensor) -> bool:
        return self.packed is not None and (self.weight is None or x_NI.shape[0] * self.weight.numel() >= _MIN_PRODUCTS)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self._runs_packed(x_NI):
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self.packed, self.bias, "none", [], "")
            return product
        assert self.weight is not None
        return F.linear(x_NI, self.weight, self.bias)

    def add_to(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        """residual + y, for a matrix without bias."""
        if self._runs_packed(x_NI):
            added: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x_NI, residual_NO, self.packed, None, "add")
            return added
        assert self.weight_t is not None
        return torch.addmm(residual_NO, x_NI, self.weight_t)


class PackedLayer:
    """The same layer as `DecoderLayer`, for a frozen copy of its weights."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, norms: Sequence[str] = INPUT_NORM
    ) -> None:
        c = config
        self.config = config
        self.num_rotated = c.num_heads + c.num_kv_heads
        self.input_norms = {name: PackedNorm(c.hidden_size, c.rms_norm_eps, dtype, device) for name in norms}
        num_read = max(len(norms), 1) * c.hidden_size
        self.mlp_norm = PackedNorm(c.hidden_size, c.rms_norm_eps, dtype, device)
        self.qkv_linear = PackedLinear(num_read, c.num_qkv * c.head_dim, dtype, device, has_bias=c.qkv_bias)
        self.qk_norm_weight = torch.empty(self.num_rotated, c.head_dim, dtype=dtype, device=device) if c.qk_norm else None
        self.output_linear = PackedLinear(c.num_heads * c.head_dim, c.hidden_size, dtype, device)
        self.gate_up_linear = PackedLinear(c.hidden_size, 2 * c.intermediate_size, dtype, device)
        self.down_linear = PackedLinear(c.intermediate_size, c.hidden_size, dtype, device)

    def load(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Copies a layer in, by its Hugging Face names below `prefix`. Missing tensors raise KeyError."""

        def cat(*names: str) -> Tensor:
            return torch.cat([tensors[prefix + name].detach() for name in names])

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gains = [norm.load(tensors[f"{prefix}{name}.weight"].detach()) for name, norm in self.input_norms.items()]
        weight = cat(*(name + ".weight" for name in qkv)).double()
        bias = cat(*(name + ".bias" for name in qkv)) if self.config.qkv_bias else None
        self.qkv_linear.load(weight * torch.cat(gains) if gains else weight, bias)
        if self.qk_norm_weight is not None:
            q, k = (tensors[f"{prefix}self_attn.{name}_norm.weight"].detach() for name in "qk")
            self.qk_norm_weight.copy_(torch.stack([q] * self.config.num_heads + [k] * self.config.num_kv_heads))
        self.output_linear.load(tensors[prefix + "self_attn.o_proj.weight"].detach())
        gain_E = self.mlp_norm.load(tensors[prefix + "post_attention_layernorm.weight"].detach())
        self.gate_up_linear.load(cat("mlp.gate_proj.weight", "mlp.up_proj.weight").double() * gain_E)
        self.down_linear.load(tensors[prefix + "mlp.down_proj.weight"].detach())

    def qkv(self, read_NI: Tensor) -> Tensor:
        if len(self.input_norms) > 1:
            parts = read_NI.chunk(len(self.input_norms), dim=-1)
            read_NI = torch.cat([norm(part) for norm, part in zip(self.input_norms.values(), parts, strict=True)], dim=-1)
        elif self.input_norms:
            (norm,) = self.input_norms.values()
            read_NI = norm(read_NI)
        qkv_NSD = self.qkv_linear(read_NI).view(-1, self.config.num_qkv, self.config.head_dim)
        if self.qk_norm_weight is not None:
            qk = qkv_NSD[:, : self.num_rotated]
            torch.mul(F.rms_norm(qk, (self.config.head_dim,), None, self.config.rms_norm_eps), self.qk_norm_weight, out=qk)
        return qkv_NSD

    def add_attention(self, x_NE: Tensor, attended_NA: Tensor) -> Tensor:
        return self.output_linear.add_to(x_NE, attended_NA)

    def add_mlp(self, x_NE: Tensor) -> Tensor:
        gate_NF, up_NF = self.gate_up_linear(self.mlp_norm(x_NE)).chunk(2, dim=-1)
        return self.down_linear.add_to(x_NE, F.silu(gate_NF).mul_(up_NF))


class PackedTransformer:
    """The engine's copy of a policy: inference only, never a parameter of anything.

    `version` counts the policies loaded, as their publisher numbers them.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.layers = [PackedLayer(config, dtype, self.device) for _ in range(config.num_layers)]
        self.embedding_VE = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=self.device)
        self.head_VE = self.embedding_VE if config.tie_embeddings else torch.empty_like(self.embedding_VE)
        self.head_linear = PackedLinear(config.hidden_size, config.vocab_size, dtype, self.device, storage=self.head_VE)
        self.final_norm = PackedNorm(config.hidden_size, config.rms_norm_eps, dtype, self.device)
        self.final_gain_E = torch.empty(config.hidden_size, dtype=dtype, device=self.device)
        self.rope = Rope(config, config.max_positions, dtype, self.device)
        self.version = -1

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copies a policy in by its Hugging Face names. Everything must arrive: KeyError or RuntimeError otherwise."""
        for index, layer in enumerate(self.layers):
            layer.load(tensors, f"model.layers.{index}.")
        self.embedding_VE.copy_(tensors["model.embed_tokens.weight"].detach())
        if not self.config.tie_embeddings:
            self.head_VE.copy_(tensors["lm_head.weight"].detach())
        self.head_linear.load(self.head_VE)
        self.final_gain_E.copy_(self.final_norm.load(tensors["model.norm.weight"].detach()))
        self.version = version

    @classmethod
    def from_module(cls, model: Transformer, dtype: torch.dtype, version: int = 0) -> PackedTransformer:
        packed = cls(model.config, dtype, model.head_weight.device)
        packed.load(dict(model.named_parameters()), version)
        return packed

    def forward(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Features_NE, as `Transformer.forward`."""
        return self.forward_capturing(token_ids_N, positions_N, attend, ())[0]

    def forward_capturing(
        self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend, capture: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """(features_NE, captured_NF): beside the features, the inputs of the layers in `capture` one after the other
        (residual sums before any norm); the number of layers stands for the features themselves."""
        x_NE = F.embedding(token_ids_N, self.embedding_VE)
        rope = self.rope.at(positions_N)
        captured = {}
        for index, layer in enumerate(self.layers):
            if index in capture:
                captured[index] = x_NE
            x_NE = run_layer(layer, index, x_NE, rope, attend)
        features_NE = self.final_norm(x_NE)
        if self.final_norm.is_folded:
            features_NE.mul_(self.final_gain_E)
        captured[len(self.layers)] = features_NE
        if len(capture) < 2:
            return features_NE, captured[capture[0]] if capture else features_NE
        return features_NE, torch.cat([captured[index] for index in capture], dim=-1)

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.embedding_VE)

    def logits(self, features: Tensor) -> Tensor:
        """[..., V]"""
        return self.head_linear(features.view(-1, self.config.hidden_size)).view(*features.shape[:-1], -1)

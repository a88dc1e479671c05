"""One decoder for the Llama, Qwen2 and Qwen3 families: training, prefill, decode and tree verification.

    token_ids_N ─ embed ─▶ x_NE ─▶ [ qkv ─ rope ─ attend ─ + ─ mlp ─ + ] × layers ─▶ norm ─▶ features_NE
    features_NE ─ head ─▶ logits_NV

Every caller runs a flat batch of N tokens; its `Attend` decides which token attends to which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tlt.models import cpu_kernels
from tlt.models.rope import Rope, Scaling, apply_rope

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "seed_oss", "transformers"]
"""model_type of config.json; transformers: any other, see any.py."""

Attend = Callable[[int, Tensor], Tensor]
"""(layer index, rotated qkv_NSD with S = H + 2K) → attention output [N, H·D]"""


@dataclass(frozen=True)
class ModelConfig:
    """`max_positions` is the window: the most tokens of a prompt and its response.
    head_scale, head_softcap: see `finish_logits`.
    """

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
    rope_scaling: Scaling | None = None
    max_positions: int = 4096
    tie_embeddings: bool = False
    num_experts: int = 0
    """Of a layer; 0: a dense model."""
    experts_per_token: int = 0
    is_text_part: bool = False
    """Whether the checkpoint also reads images (hf/text_part.py)."""
    is_hybrid: bool = False
    """Whether layers carry a state from token to token (linear attention, convolutions): a forward has one
    sequence."""
    head_scale: float = 1.0
    head_softcap: float | None = None

    @property
    def qkv_bias(self) -> bool:
        return self.architecture in ("qwen2", "seed_oss")

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "qwen3"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """By layer; None: it sees all. (): every layer does."""
        return ()

    @property
    def num_qkv(self) -> int:
        """S: queries, then keys, then values."""
        return self.num_heads + 2 * self.num_kv_heads

    def finish_logits(self, products: Tensor) -> Tensor:
        """softcap · tanh(scale · x Wᵀ / softcap). products: x Wᵀ."""
        logits = products if self.head_scale == 1.0 else products * self.head_scale
        cap = self.head_softcap
        return logits if cap is None else (logits / cap).tanh() * cap


# ── the computation, once ───────────────────────────────────────────────────────────────────────────────────


class Layer(Protocol):
    """Attention runs between the first two steps."""

    num_rotated: int

    def qkv(self, read_NI: Tensor) -> Tensor: ...
    def add_attention(self, x_NE: Tensor, attended_NA: Tensor) -> Tensor: ...
    def add_mlp(self, x_NE: Tensor) -> Tensor: ...


def run_layer(
    layer: Layer,
    index: int,
    x_NE: Tensor,
    rope: tuple[Tensor, Tensor],
    attend: Attend,
    read_NI: Tensor | None = None,
) -> Tensor:
    """read_NI: attention's input, if not x_NE (EAGLE-3's drafter)."""
    qkv_NSD = apply_rope(layer.qkv(x_NE if read_NI is None else read_NI), layer.num_rotated, *rope)
    x_NE = layer.add_attention(x_NE, attend(index, qkv_NSD))
    return layer.add_mlp(x_NE)


# ── trainable ───────────────────────────────────────────────────────────────────────────────────────────────


class Linear(nn.Linear):
    def forward(self, x_NI: Tensor) -> Tensor:
        if not cpu_kernels.can_multiply(x_NI):
            return super().forward(x_NI)
        product: Tensor = cpu_kernels.OneDnnProduct.apply(x_NI, self.weight)  # type: ignore[no-untyped-call]
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
        c = self.config = config
        self.q_proj = Linear(input_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(input_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(input_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def qkv(self, h_NE: Tensor) -> Tensor:
        c = self.config
        qkv_NA = torch.cat([self.q_proj(h_NE), self.k_proj(h_NE), self.v_proj(h_NE)], dim=-1)
        qkv_NSD = qkv_NA.view(-1, c.num_qkv, c.head_dim)
        if not c.qk_norm:
            return qkv_NSD
        q, k, v = qkv_NSD.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=1)

    def kv(self, h_NE: Tensor) -> Tensor:
        """Keys, then values [N, 2K, D] (a block drafter's context)."""
        c = self.config
        k_NKD, v_NKD = (f(h_NE).view(-1, c.num_kv_heads, c.head_dim) for f in (self.k_proj, self.v_proj))
        return torch.cat([self.k_norm(k_NKD) if c.qk_norm else k_NKD, v_NKD], dim=1)


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
    """Attention reads one vector per name in `norms`, through a norm of that name; without names it reads its
    input as it is (EAGLE's drafter)."""

    def __init__(self, config: ModelConfig, *, norms: Sequence[str] = INPUT_NORM) -> None:
        super().__init__()
        self.self_attn = Attention(config, max(len(norms), 1) * config.hidden_size)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.norm_names = tuple(norms)
        for name in norms:
            self.add_module(name, RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.num_rotated = config.num_heads + config.num_kv_heads

    def forward(
        self,
        index: int,
        x_NE: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: Attend,
        read_NI: Tensor | None = None,
    ) -> Tensor:
        """Sharding (FSDP2) hooks in here, so nothing else reads the layer's tensors."""
        return run_layer(self, index, x_NE, rope, attend, read_NI)

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


@torch.no_grad()
def randomize_matrices(model: nn.Module, seed: int, std: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)


class DecoderStack(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Given(torch.autograd.Function):
    """(computed, given) ─▶ given, with the derivative of what was computed."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, given: Tensor) -> Tensor:
        return given.to(computed.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def given(computed: Tensor, number: Tensor) -> Tensor:
    result: Tensor = Given.apply(computed, number)  # type: ignore[no-untyped-call]
    return result


Reader = Callable[[Tensor], Any]
"""features_NE → result of a forward. It may read the head, because it runs within the forward."""


class Policy(nn.Module):
    """A trainable decoder. A tied head has no entry."""

    config: ModelConfig
    route_shape: tuple[int, int] = (0, 0)
    """(layers with experts, experts that a token takes)."""

    @property
    def layers(self) -> nn.ModuleList:
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        """[V, E]; in a tied model, the embedding."""
        raise NotImplementedError

    def forward(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        attend: Any,
        read: Reader | None = None,
        inputs: Sequence[Tensor] = (),
    ) -> Any:
        """Returns read(features_NE), or features_NE, the output of the final norm.

        A sharded model is whole only within its forward: call its `logits` in `read`.

        inputs: of each layer, and the features, found by another computation of the model; they replace this
            one's numbers, and keep its derivatives. (): there is no other.
        """
        raise NotImplementedError

    def logits(self, features_NE: Tensor) -> Tensor:
        raise NotImplementedError

    def initialize_buffers(self, device: torch.device) -> None:
        """Computes what no checkpoint holds. Our own decoder has no buffers."""


class Transformer(Policy):
    def __init__(self, config: ModelConfig, checkpoints_activations: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoints_activations = checkpoints_activations
        self.model = DecoderStack(config)
        self.lm_head = (
            None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self._rope: Rope | None = None

    def initialize(self, seed: int, std: float = 0.02) -> Transformer:
        randomize_matrices(self, seed, std)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
        return self

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        attend: Attend,
        read: Reader | None = None,
        inputs: Sequence[Tensor] = (),
    ) -> Any:
        x_NE = self.model.embed_tokens(token_ids_N)
        self._rope = Rope.matching(x_NE, self.config, self._rope)
        rope = self._rope.at(positions_N)
        for index, layer in enumerate(self.model.layers):
            if inputs:
                x_NE = given(x_NE, inputs[index])
            if self.checkpoints_activations and torch.is_grad_enabled():
                x_NE = checkpoint(
                    layer, index, x_NE, rope, attend, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_NE = layer(index, x_NE, rope, attend)
        features_NE: Tensor = self.model.norm(x_NE)
        if inputs:
            features_NE = given(features_NE, inputs[-1])
        return features_NE if read is None else read(features_NE)

    def logits(self, features_NE: Tensor) -> Tensor:
        return F.linear(features_NE, self.head_weight)

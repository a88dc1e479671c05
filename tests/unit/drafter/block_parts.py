"""Drafters of a target that is deep enough for them, in float64; of block drafters the forward written out plainly: no cache, no batch, no
fused matrix, nothing of the package but the tensors' names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.lossless.helpers import CONFIG, VOCAB, make_policy, pack
from tests.unit.drafter.parts import make_model
from tlt.drafter.block import BlockModel
from tlt.drafter.drafting.learned.drafter import LearnedDrafter, LearnedSettings
from tlt.drafter.forms import pack_drafter
from tlt.drafter.shape import BlockOptions, DrafterShape, Method, training_capture
from tlt.drafter.training.buffer import PackedBatch
from tlt.models.attention import PackedCausal
from tlt.models.packed import PackedTransformer

DEEP = replace(CONFIG, num_layers=6)
POLICY = make_policy(config=DEEP)
TARGET = pack(POLICY)
SIZE = DEEP.hidden_size
NUM_DRAFTED = 4
FORMS: list[tuple[Method, int | None]] = [("dflash", None), ("dspark", None), ("dspark", VOCAB - 3)]


def make_block(method: Method, draft_vocab: int | None = None, seed: int = 2, layers: int = 2) -> BlockModel:
    model = make_model(seed, method, draft_vocab, DEEP, BlockOptions(layers, NUM_DRAFTED, mask_token_id=13))
    assert isinstance(model, BlockModel)
    return model


def make_drafter(
    model: BlockModel, max_slots: int = 4, window: int = 4096, tau: float = 0.7
) -> LearnedDrafter:
    packed = pack_drafter(model.config, model.state_dict(), torch.float64)
    settings = LearnedSettings(tau=tau, window=window, calibrate=False)
    return LearnedDrafter(packed, TARGET, max_slots, settings)


@torch.no_grad()
def captured_of(
    shape: DrafterShape, tokens: Sequence[int], target: PackedTransformer = TARGET, for_training: bool = False
) -> Tensor:
    """What the drafter reads of the target at every token."""
    capture = training_capture(shape, DEEP.num_layers) if for_training else shape.capture
    attend = PackedCausal(DEEP, [len(tokens)])
    return target.forward_capturing(torch.tensor(tokens), attend.positions(), attend, capture)[1]


def make_batch(shape: DrafterShape, lengths: tuple[int, ...] = (9, 4, 12), seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    captured = torch.cat([captured_of(shape, row, for_training=True) for row in rows])
    weight = torch.tensor([float(t >= 2) for n in lengths for t in range(1, n)])
    return PackedBatch(torch.tensor([t for row in rows for t in row]), captured, lengths, weight)


# ── the forward, written out ────────────────────────────────────────────────────────────────────────────────


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + DEEP.rms_norm_eps).sqrt() * weight


def rotated(x_D: Tensor, position: int) -> Tensor:
    """Turns the pairs (i, i + D/2) of a head."""
    half = len(x_D) // 2
    out = torch.empty_like(x_D)
    for i in range(half):
        angle = position * DEEP.rope_theta ** (-2 * i / len(x_D))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x_D[i] * cos - x_D[i + half] * sin
        out[i + half] = x_D[i + half] * cos + x_D[i] * sin
    return out


@torch.no_grad()
def plain_slots(
    model: BlockModel, tokens: Sequence[int], captured_TF: Tensor, anchor: int, num_drafted: int = NUM_DRAFTED
) -> Tensor:
    """The hidden states [slots, E] of a block of so many drafted tokens at this place, from the captured
    columns before it."""
    shape, w, embedding_VE = model.config, model.state_dict(), POLICY.model.embed_tokens.weight
    head_dim, heads, kv_heads = DEEP.head_dim, DEEP.num_heads, DEEP.num_kv_heads
    context = rms(captured_TF[:anchor, : shape.feature_size] @ w["fc.weight"].T, w["hidden_norm.weight"])
    block = [tokens[anchor], *[shape.mask_token_id] * (shape.first_slot + num_drafted - 1)]
    x = embedding_VE[block].clone()
    for index in range(shape.layer.num_layers):
        p = f"layers.{index}."
        normed = rms(x, w[p + "input_layernorm.weight"])
        read = torch.cat([context, normed])  # the context passes no input_layernorm
        attended = []
        for h in range(heads):
            rows = slice(h * head_dim, (h + 1) * head_dim)
            group = h // (heads // kv_heads)
            shared = slice(group * head_dim, (group + 1) * head_dim)
            q = rms(normed @ w[p + "self_attn.q_proj.weight"][rows].T, w[p + "self_attn.q_norm.weight"])
            k = rms(read @ w[p + "self_attn.k_proj.weight"][shared].T, w[p + "self_attn.k_norm.weight"])
            v = read @ w[p + "self_attn.v_proj.weight"][shared].T
            q = torch.stack([rotated(row, anchor + i) for i, row in enumerate(q)])
            k = torch.stack([rotated(row, i) for i, row in enumerate(k)])  # the block follows its context
            attended.append((q @ k.T / math.sqrt(head_dim)).softmax(-1) @ v)
        x = x + torch.cat(attended, dim=-1) @ w[p + "self_attn.o_proj.weight"].T
        normed = rms(x, w[p + "post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(normed @ w[p + "mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    return x


@torch.no_grad()
def plain_logits(model: BlockModel, hidden_E: Tensor, before: int) -> Tensor:
    """The logits [V] of a slot behind the token `before`; -inf outside the draft vocabulary."""
    w, kept = model.state_dict(), list(range(VOCAB))
    if model.config.is_reduced:
        kept = w["t2d"].nonzero()[:, 0].tolist()
    logits = POLICY.model.embed_tokens.weight[kept] @ rms(hidden_E, w["norm.weight"])
    if model.config.markov_rank:
        logits = logits + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][before]
    whole = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
    whole[kept] = logits
    return whole


def drafting_slots(model: BlockModel, hidden_UE: Tensor) -> Tensor:
    """The slots that propose: DFlash's anchor proposes nothing."""
    return hidden_UE[1:] if model.config.method == "dflash" else hidden_UE

"""Block drafters: one pass drafts a block of tokens.

    captured layers at t ─ fc ─ hidden_norm ─▶ context t ─ k_proj, v_proj of every layer ─▶ kept per token
                                                                   │ read by
    block   [anchor, mask, mask, …] at p, p+1, p+2, … ─ embed ─▶ layers ─ norm ─ head ─▶ logits of every slot

The anchor is the last committed token, at position p. The target has not read the anchor yet: the context
holds the tokens before it, and skips input_layernorm.

    dflash   slot k, from 1 on, proposes token p+k          DFlash (z-lab)
    dspark   slot k, from 0 on, proposes token p+k+1        DSpark (arXiv 2607.05147), which may add a
             Markov head: logits of slot k += W2 W1[the token at p+k]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.base.uploads import upload
from tlt.drafter.model import Anchors, DraftModel, Embed, PackedDrafter, PackedText, flatten_anchors
from tlt.drafter.shape import BlockShape
from tlt.models.block_attention import BlockAttention
from tlt.models.decoder import Attend, DecoderLayer, RMSNorm, run_layer
from tlt.models.packed import PackedLayer, PackedLinear, PackedNorm
from tlt.models.rope import apply_rope


class MarkovHead(nn.Module):
    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)


class BlockModel(DraftModel):
    config: BlockShape

    def __init__(self, config: BlockShape) -> None:
        super().__init__(config)
        layer = config.layer
        self.hidden_norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(layer) for _ in range(layer.num_layers))
        if config.markov_rank:
            self.markov_head = MarkovHead(layer.vocab_size, config.draft_vocab_size, config.markov_rank)

    def initialize(self, seed: int) -> DraftModel:
        super().initialize(seed)
        if self.config.markov_rank:
            nn.init.zeros_(self.markov_head.markov_w2.weight)
        return self

    def context(self, captured_NF: Tensor, positions_N: Tensor) -> list[Tensor]:
        """Returns, per layer, rotated keys and values [N, 2K, D]."""
        read_NE = self.hidden_norm(self.fc(captured_NF[..., : self.config.feature_size]))
        rope, num_keys = self.rope_at(read_NE, positions_N), self.config.layer.num_kv_heads
        return [apply_rope(kv(read_NE), num_keys, *rope) for kv in self._kv()]

    def _kv(self) -> list[Callable[[Tensor], Tensor]]:
        return [cast("DecoderLayer", layer).self_attn.kv for layer in self.layers]

    def forward(self, embeddings_NE: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        rope, x_NE = self.rope_at(embeddings_NE, positions_N), embeddings_NE
        for index, layer in enumerate(self.layers):
            x_NE = layer(index, x_NE, rope, attend)
        return x_NE

    def predict(self, text: PackedText, anchors: Anchors, embed: Embed) -> Tensor:
        return run_blocks(self, text, anchors, embed)[:, self.config.first_slot]

    def bias(self, tokens: Tensor, token_ids: Tensor | None) -> Tensor | None:
        if not self.config.markov_rank:
            return None
        rows_VR = self.markov_head.markov_w2.weight
        is_chosen = token_ids is not None and self.config.can_choose
        states = self.markov_head.markov_w1(tokens)
        return F.linear(states, rows_VR[token_ids] if is_chosen else rows_VR)


class PackedBlock(PackedDrafter):
    model_class = BlockModel
    config: BlockShape

    def __init__(self, config: BlockShape, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(config, dtype, device)
        c = config.layer
        self.hidden_norm = PackedNorm(c.hidden_size, c.rms_norm_eps, dtype, self.device)
        num_kv = c.num_layers * 2 * c.num_kv_heads * c.head_dim
        self.context_linear = PackedLinear(c.hidden_size, num_kv, dtype, self.device)
        self.key_norm_L1D = torch.empty(c.num_layers, 1, c.head_dim, dtype=dtype, device=self.device)
        self.layers = [PackedLayer(c, dtype, self.device) for _ in range(c.num_layers)]
        self.w1_VR: Tensor | None = None
        self.w2_VR: Tensor | None = None
        self._w2: PackedLinear | None = None  # rows of the draft vocabulary

    def load_layers(self, tensors: Mapping[str, Tensor]) -> None:
        self.hidden_norm.load(tensors["hidden_norm.weight"])
        rows = []
        for index, layer in enumerate(self.layers):
            prefix = f"layers.{index}."
            layer.load(tensors, prefix)
            rows += [tensors[f"{prefix}self_attn.{name}_proj.weight"].to(self.device) for name in "kv"]
            self.key_norm_L1D[index, 0].copy_(tensors[f"{prefix}self_attn.k_norm.weight"])
        self.context_linear.load(torch.cat(rows))
        if self.config.markov_rank:
            w1_VR, w2_VR = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
            self.w1_VR, self.w2_VR = (w.to(self.device, self.dtype, copy=True) for w in (w1_VR, w2_VR))
            self._w2 = None

    def choose(self, token_ids: Tensor | None) -> None:
        super().choose(token_ids)
        self._w2 = None

    def context(self, captured_NF: Tensor, positions_N: Tensor) -> list[Tensor]:
        c = self.config.layer
        read_NE = self.hidden_norm(self.fc(captured_NF[..., : self.config.feature_size]))
        kv_NLSD = self.context_linear(read_NE).view(-1, c.num_layers, 2 * c.num_kv_heads, c.head_dim)
        keys = kv_NLSD[:, :, : c.num_kv_heads]
        torch.mul(F.rms_norm(keys, (c.head_dim,), None, c.rms_norm_eps), self.key_norm_L1D, out=keys)
        rope = self.rope.at(positions_N)
        return [apply_rope(kv_NSD, c.num_kv_heads, *rope) for kv_NSD in kv_NLSD.unbind(1)]

    def forward(self, embeddings_NE: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        rope, x_NE = self.rope.at(positions_N), embeddings_NE
        for index, layer in enumerate(self.layers):
            x_NE = run_layer(layer, index, x_NE, rope, attend)
        return x_NE

    def predict(self, text: PackedText, anchors: Anchors, embed: Embed) -> Tensor:
        return run_blocks(self, text, anchors, embed)[:, self.config.first_slot]

    def bias(self, tokens: Tensor) -> Tensor | None:
        if self.w1_VR is None or self.w2_VR is None:
            return None
        if self._w2 is None:
            is_chosen = self.config.can_choose and self.token_ids is not None
            rows_VR = self.w2_VR[self.token_ids] if is_chosen else self.w2_VR
            num_rows, rank = rows_VR.shape
            self._w2 = PackedLinear(rank, num_rows, self.dtype, self.device, storage=rows_VR)
            self._w2.load(rows_VR)
        states = F.embedding(tokens, self.w1_VR)
        return self._w2(states.flatten(0, -2)).view(*tokens.shape, -1)


def fill_blocks(shape: BlockShape, anchors_A: Tensor, num_slots: int) -> Tensor:
    tokens_AU = anchors_A.new_full((len(anchors_A), num_slots), shape.mask_token_id)
    tokens_AU[:, 0] = anchors_A
    return tokens_AU


def run_blocks(drafter: BlockModel | PackedBlock, text: PackedText, anchors: Anchors, embed: Embed) -> Tensor:
    """Returns hidden states [A, block_size, E]."""
    shape, device = drafter.config, text.token_ids_N.device
    positions_N = torch.cat([torch.arange(length, device=device) for length in text.lengths])
    index_A = upload(flatten_anchors(text.lengths, anchors), device)
    tokens_AU = fill_blocks(shape, text.token_ids_N[index_A], shape.block_size)
    positions_AU = positions_N[index_A, None] + torch.arange(shape.block_size, device=device)
    positions_M = positions_AU.flatten().clamp_max(shape.layer.max_positions - 1)
    embeddings_ME = embed(tokens_AU.flatten())
    context = drafter.context(text.captured_NF.to(embeddings_ME.dtype), positions_N)
    attend = BlockAttention(shape.layer, context, text.lengths, anchors, shape.block_size)
    return drafter.forward(embeddings_ME, positions_M, attend).view(*tokens_AU.shape, -1)

"""Attention within packed sequences and over a cache, by SDPA: the reference for cpu_kernels.py and
loops/attention.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.base.uploads import upload
from tlt.models import cpu_kernels, flash
from tlt.models.attention_form import PLAIN, AttentionForm, attend_causal, attend_masked
from tlt.models.decoder import ModelConfig
from tlt.models.kv_cache import ring_length, store
from tlt.models.loops import available
from tlt.models.ring_prefill import RingPrefill

if TYPE_CHECKING:
    from tlt.models.loops.attention import CompiledAttention

MASK_ENTRIES = 2**26
"""Most entries of a repeated mask (128 MiB in bfloat16); a larger batch attends in parts."""


def keep_to_steady_kernels() -> None:
    """cuDNN's attention plans for some hundred milliseconds per new shape, and every decoding step has
    one."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def takes_no_groups(q: Tensor) -> bool:
    """PyTorch's memory-efficient kernels for float32 need a key head per query head; else a GPU stores all
    scores."""
    return q.is_cuda and q.dtype not in (torch.bfloat16, torch.float16)


class PackedCausal:
    """Causal attention within each sequence of one flat batch."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self._packed: flash.PackedLengths | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.cat([torch.arange(length, device=device) for length in self.lengths])

    def __call__(self, layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        if flash.serves(qkv_NSD, form):
            return self._together(qkv_NSD, form)
        return torch.cat([self._causal(qkv_TSD, form) for qkv_TSD in qkv_NSD.split(self.lengths)])

    def _together(self, qkv_NSD: Tensor, form: AttentionForm) -> Tensor:
        if self._packed is None:
            self._packed = flash.PackedLengths(self.lengths, qkv_NSD.device)
        return flash.attend_packed(qkv_NSD, self.num_heads, self.num_kv_heads, self._packed, form)

    def _causal(self, qkv_TSD: Tensor, form: AttentionForm) -> Tensor:
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = (part.transpose(0, 1)[None] for part in qkv_TSD.split(heads, dim=1))
        if not form.is_plain_within(len(qkv_TSD)):
            return attend_causal(q[0], k[0], v[0], form).transpose(0, 1).flatten(1)
        is_grouped = self.num_heads != self.num_kv_heads
        if is_grouped and takes_no_groups(q):
            group, is_grouped = self.num_heads // self.num_kv_heads, False
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        out_1HTD = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=form.scale, enable_gqa=is_grouped
        )
        return out_1HTD[0].transpose(0, 1).flatten(1)


class SharedPrompts(PackedCausal):
    """Causal attention for families: sequences with a common prompt, stored once.

        family    [prompt] [own tokens] [own tokens] …      each sequence sees the prompt and itself

    families: per family, the prompt's length and the lengths of its sequences without it, possibly 0.

    A sequence attends with a copy of the prompt's queries, keys and values: no matrix product is repeated.
    """

    def __init__(self, config: ModelConfig, families: Sequence[tuple[int, Sequence[int]]]) -> None:
        super().__init__(config, [part for prompt, own in families for part in (prompt, *own)])
        self.families = [(prompt, list(own)) for prompt, own in families]
        self._copied: tuple[Tensor, Tensor, flash.PackedLengths] | None = None

    @property
    def num_sequences(self) -> int:
        return len(self._runs())

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        spans = [span for prompt, own in self.families for span in ((0, prompt), *((prompt, n) for n in own))]
        return torch.cat([torch.arange(start, start + length, device=device) for start, length in spans])

    def __call__(self, layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        if flash.serves(qkv_NSD, form):
            return self._together(qkv_NSD, form)
        parts = iter(qkv_NSD.split(self._runs()))
        outputs = []
        for prompt, own in self.families:
            first_TSD = next(parts)
            outputs.append(self._causal(first_TSD, form))
            for _ in own[1:]:
                outputs.append(self._causal(torch.cat([first_TSD[:prompt], next(parts)]), form)[prompt:])
        return torch.cat(outputs)

    def _together(self, qkv_NSD: Tensor, form: AttentionForm) -> Tensor:
        if self._copied is None:
            copies, own, lengths = self._copies()
            device = qkv_NSD.device
            packed = flash.PackedLengths(lengths, device)
            self._copied = upload(copies, device), upload(own, device), packed
        copies_M, own_N, packed = self._copied
        out_MC = flash.attend_packed(qkv_NSD[copies_M], self.num_heads, self.num_kv_heads, packed, form)
        return out_MC[own_N]

    def _copies(self) -> tuple[list[int], list[int], list[int]]:
        copies: list[int] = []
        own_ones: list[int] = []
        lengths = []
        start = 0  # of the family
        for prompt, own in self.families:
            end = start + prompt  # of what is placed
            for index, num_own in enumerate(own or [0]):
                shared = 0 if index == 0 else prompt
                own_ones += range(len(copies) + shared, len(copies) + prompt + num_own)
                copies += [*range(start, start + prompt), *range(end, end + num_own)]
                end += num_own
                lengths.append(prompt + num_own)
            start = end
        return copies, own_ones, lengths

    def _runs(self) -> list[int]:
        return [length for prompt, own in self.families for length in (prompt + sum(own[:1]), *own[1:])]


class Unrolled(PackedCausal):
    """Causal attention for training a drafter on its own steps, one call per step.

    In the first step, pair t sees the pairs up to t; later also its own pairs of the later steps, like a
    draft from position t (HASS, arXiv 2408.15766, §3.2; EAGLE-3, arXiv 2503.01840, §3.2).
    """

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        super().__init__(config, lengths)
        self.first_NHD: tuple[Tensor, Tensor] | None = None
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def __call__(self, layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        assert form is PLAIN, "a drafter's layer is Llama's"
        q_NHD, k_NKD, v_NKD = qkv_NSD.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        group = self.num_heads // self.num_kv_heads
        k_NHD, v_NHD = (x.repeat_interleave(group, dim=1) for x in (k_NKD, v_NKD))
        if self.first_NHD is None:
            self.first_NHD = k_NHD, v_NHD
            return super().__call__(layer, qkv_NSD)
        self.own_keys.append(k_NHD)
        self.own_values.append(v_NHD)
        own = (torch.stack(self.own_keys, dim=1), torch.stack(self.own_values, dim=1))
        attend = cpu_kernels.CausalAndOwn.apply if cpu_kernels.can_fuse(q_NHD) else causal_and_own
        outputs = []
        parts = zip(*(x.split(self.lengths) for x in (q_NHD, *self.first_NHD, *own)), strict=True)
        for *qkv, own_k_TIHD, own_v_TIHD in parts:
            own_IHTD = (x.permute(1, 2, 0, 3) for x in (own_k_TIHD, own_v_TIHD))
            out_HTD = attend(*(x_THD.transpose(0, 1) for x_THD in qkv), *own_IHTD)
            outputs.append(out_HTD.transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def causal_and_own(
    q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, own_k_IHTD: Tensor, own_v_IHTD: Tensor
) -> Tensor:
    """[H, T, D]: query t sees the keys up to t, and the keys at t of the I own steps."""
    q_HTD = q_HTD * q_HTD.shape[-1] ** -0.5
    length = q_HTD.shape[1]
    future_TT = torch.ones(length, length, dtype=torch.bool, device=q_HTD.device).triu_(1)
    scores_HTT = (q_HTD @ k_HTD.transpose(1, 2)).masked_fill(future_TT, float("-inf"))
    own_HTI = (q_HTD * own_k_IHTD).sum(-1).movedim(0, -1)
    weights_HTL = torch.cat([scores_HTT, own_HTI], dim=-1).softmax(dim=-1)
    own_IHT1 = weights_HTL[..., length:].movedim(-1, 0)[..., None]
    return weights_HTL[..., :length] @ v_HTD + (own_IHT1 * own_v_IHTD).sum(0)


class Prefill(Protocol):
    def positions(self, device: torch.device | str = "cpu") -> Tensor: ...
    def __call__(self, layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor: ...


class StoringPrefill(SharedPrompts):
    """Also writes the keys and values of sequence i to cache slot slots[i], from position 0 on."""

    def __init__(
        self,
        config: ModelConfig,
        families: Sequence[tuple[int, Sequence[int]]],
        layers_SKLD: Sequence[Tensor],
        slots: Sequence[int],
    ) -> None:
        super().__init__(config, families)
        self.layers, self.slots = layers_SKLD, list(slots)

    def __call__(self, layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        kv_SKLD, slots = self.layers[layer], iter(self.slots)
        parts = iter(qkv_NSD[:, self.num_heads :].transpose(0, 1).split(self._runs(), dim=1))
        for prompt, own in self.families:
            first_KTD, first = next(parts), next(slots)
            store(kv_SKLD, first, 0, first_KTD)
            for _ in own[1:]:
                slot, own_KTD = next(slots), next(parts)
                store(kv_SKLD, slot, 0, first_KTD[:, :prompt])
                store(kv_SKLD, slot, prompt, own_KTD)
        return super().__call__(layer, qkv_NSD, form)


def prepare_kernels(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cpu":
        keep_to_steady_kernels()
    elif (loops := available.attention(dtype, device)) is not None:
        loops.compiled(dtype)


def storing_prefill(
    config: ModelConfig,
    families: Sequence[tuple[int, Sequence[int]]],
    layers_SKLD: Sequence[Tensor],
    slots: Sequence[int],
) -> Prefill:
    layer = layers_SKLD[0]
    loops = available.attention(layer.dtype, layer.device)
    if loops is None:
        return StoringPrefill(config, families, layers_SKLD, slots)
    if any(config.windows):
        return RingPrefill(loops, config, families, layers_SKLD, slots)
    made: Prefill = loops.Packed(config, families, layers_SKLD, slots)
    return made


def cached(
    config: ModelConfig,
    layers_SKLD: Sequence[Tensor],
    columns_BT: Tensor,
    length: int,
    mask_BTL: Tensor | None,
    lengths: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
    positions_BT: Tensor | None = None,
) -> Cached | CompiledAttention:
    """Takes compiled loops where there are any.

    lengths: per sequence, the number of columns that its new tokens see; None: `length`.
    """
    B, T = columns_BT.shape
    loops = available.attention(layers_SKLD[0].dtype, columns_BT.device)
    if loops is None:
        return Cached(config, layers_SKLD, columns_BT, length, mask_BTL, counts, positions_BT)
    rows = loops.rows_of_cache(list(zip(counts or [T] * B, lengths or [length] * B, strict=True)), T)
    mask_BTL = None if T == 1 and lengths is not None else mask_BTL  # a single token sees all of its columns
    real_N = None if counts is None else real_tokens(counts, T, columns_BT.device)
    places = loops.Places(columns_BT, positions_BT, None, mask_BTL)
    made: CompiledAttention = loops.CompiledAttention(config, layers_SKLD, rows, places, real_N)
    return made


class Trees(Protocol):
    """Draft trees behind B cached sequences (speculation/law/tree.py). parents_BN: None for chains."""

    @property
    def length(self) -> int: ...
    @property
    def columns_BN(self) -> Tensor: ...
    @property
    def positions_BN(self) -> Tensor: ...
    @property
    def parents_BN(self) -> Tensor | None: ...
    @property
    def mask_BNL(self) -> Tensor | None: ...
    @property
    def lengths(self) -> Sequence[int]: ...
    @property
    def counts(self) -> Sequence[int] | None: ...


def cached_trees(
    config: ModelConfig, layers_SKLD: Sequence[Tensor], trees: Trees
) -> Cached | CompiledAttention:
    loops = available.attention(layers_SKLD[0].dtype, trees.columns_BN.device)
    (B, N), counts = trees.columns_BN.shape, trees.counts
    if loops is None:
        positions_BN = None if trees.parents_BN is None else trees.positions_BN
        mask_BNL = trees.mask_BNL
        return Cached(config, layers_SKLD, trees.columns_BN, trees.length, mask_BNL, counts, positions_BN)
    rows = loops.rows_of_cache(list(zip(counts or [N] * B, trees.lengths, strict=True)), N)
    real_N = None if counts is None else real_tokens(counts, N, trees.columns_BN.device)
    places = loops.Places(trees.columns_BN, trees.positions_BN, trees.parents_BN, is_causal=True)
    made: CompiledAttention = loops.CompiledAttention(config, layers_SKLD, rows, places, real_N)
    return made


class Cached:
    """T new tokens of each of B sequences attend over their cache, which is written first.

    layers_SKLD: see `Cache`.
    columns_BT: columns of the new entries; `length` are read.
    mask_BTL: added to the scores; None: new tokens see all `length` entries.
    counts: new tokens of each sequence, without padding in input and output; None: T each.
    positions_BT: of the new tokens, where a window counts them; None: their columns (chains).

    A layer shorter than `length` is a ring.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers_SKLD: Sequence[Tensor],
        columns_BT: Tensor,
        length: int,
        mask_BTL: Tensor | None,
        counts: Sequence[int] | None = None,
        positions_BT: Tensor | None = None,
    ) -> None:
        self.layers, self.length = layers_SKLD, length
        self.columns_BT, self.mask_BTL = columns_BT, mask_BTL
        self.positions_BT = columns_BT if positions_BT is None else positions_BT
        self.hidden_by_window: dict[int | None, Tensor | None] = {}
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.group = config.num_heads // config.num_kv_heads
        self.batch, self.num_new = columns_BT.shape
        self.columns = columns_BT
        self.rows = torch.arange(self.batch, device=columns_BT.device)[:, None]
        self.real_N: Tensor | None = None
        if counts is not None:
            self.real_N = real_tokens(counts, self.num_new, columns_BT.device)
            self.rows = self.real_N // self.num_new
            self.columns = columns_BT.flatten()[self.real_N]
        self.mask = None if mask_BTL is None else mask_BTL[:, None]
        self.rows_at_once = self.batch
        if self.mask is not None and self.group > 1:
            self.rows_at_once = max(1, MASK_ENTRIES // (self.group * self.mask[0].numel()))
            if self.batch <= self.rows_at_once:
                self.mask = self._for_groups(self.mask)

    def __call__(self, layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        cache_SKLD = self.layers[layer]
        q_NHD, new_NKD = qkv_NSD.tensor_split([self.num_heads], dim=1)
        ring = cache_SKLD.shape[2] if cache_SKLD.shape[2] < self.length else None
        columns = self.columns if ring is None else self.columns % ring
        cache_SKLD[self.rows, :, columns] = new_NKD.view(*columns.shape, *new_NKD.shape[1:])
        B, T = self.batch, self.num_new
        q_NHD = pad(q_NHD, self.real_N, B * T)
        k_BKLD, v_BKLD = cache_SKLD[:B, :, : self.length].chunk(2, dim=1)
        if form.is_plain_within(self.length):
            assert ring is None, "a layer without a window keeps all"
            out_NC = self._attend_grouped(q_NHD, k_BKLD, v_BKLD, form.scale)
        else:
            hidden = self._hidden(form.window) if ring is None else self._hidden_in_ring(form.window, ring)
            q_BHTD = q_NHD.view(B, T, self.num_heads, -1).transpose(1, 2)
            out_BHTD = attend_masked(q_BHTD, k_BKLD, v_BKLD, form, hidden)
            out_NC = out_BHTD.transpose(1, 2).reshape(B * T, -1)
        return out_NC if self.real_N is None else out_NC.index_select(0, self.real_N)

    def _hidden(self, window: int | None) -> Tensor | None:
        """bool[B, T, L]: entries that a new token does not see; None: it sees all."""
        if window not in self.hidden_by_window:
            hidden_BTL = None if self.mask_BTL is None else self.mask_BTL < 0
            if window is not None:
                entries_BL = torch.arange(self.length, device=self.columns_BT.device).repeat(self.batch, 1)
                entries_BL.scatter_(1, self.columns_BT.clamp_max(self.length - 1), self.positions_BT)
                far_BTL = self.positions_BT[:, :, None] - entries_BL[:, None] >= window
                hidden_BTL = far_BTL if hidden_BTL is None else hidden_BTL | far_BTL
            self.hidden_by_window[window] = hidden_BTL
        return self.hidden_by_window[window]

    def _hidden_in_ring(self, window: int | None, ring: int) -> Tensor:
        """bool[B, T, R]. A column holds the latest position of its remainder; or one of a rejected draft,
        instead of a position before the window."""
        assert window is not None
        assert ring >= ring_length(window), f"a ring of {ring} columns for a window of {window}"
        last_B1 = self.columns_BT.amax(dim=1, keepdim=True)
        held_BR = last_B1 - (last_B1 - torch.arange(ring, device=last_B1.device)) % ring
        hidden_BTL = self._hidden(window)
        assert hidden_BTL is not None
        hidden_BTR = hidden_BTL.gather(2, held_BR.clamp_min(0)[:, None].expand(-1, self.num_new, -1))
        return hidden_BTR | (held_BR < 0)[:, None]

    def _attend_grouped(self, q_NHD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, scale: float | None) -> Tensor:
        B, T, K, G = self.batch, self.num_new, self.num_kv_heads, self.group
        q_BTKGD = q_NHD.view(B, T, K, G, -1)
        q_BKTD = q_BTKGD.permute(0, 2, 3, 1, 4).reshape(B, K, G * T, -1)
        if self.mask is None or self.batch <= self.rows_at_once:
            out_BKTD = F.scaled_dot_product_attention(
                q_BKTD, k_BKLD, v_BKLD, attn_mask=self.mask, scale=scale
            )
        else:
            folded = (x.split(self.rows_at_once) for x in (q_BKTD, k_BKLD, v_BKLD, self.mask))
            out_BKTD = torch.cat(
                [
                    F.scaled_dot_product_attention(q, k, v, attn_mask=self._for_groups(mask), scale=scale)
                    for q, k, v, mask in zip(*folded, strict=True)
                ]
            )
        return out_BKTD.view(B, K, G, T, -1).permute(0, 3, 1, 2, 4).reshape(B * T, -1)

    def _for_groups(self, mask_B1TL: Tensor) -> Tensor:
        return mask_B1TL.repeat(1, 1, self.group, 1)


def real_tokens(counts: Sequence[int], num_columns: int, device: torch.device) -> Tensor:
    """int64[sum of counts]: flat indices of each sequence's first tokens."""
    return upload([b * num_columns + i for b, count in enumerate(counts) for i in range(count)], device)


def pad(x_NX: Tensor, real_N: Tensor | None, num_tokens: int) -> Tensor:
    """[num_tokens, X]: x at the indices `real_N`, zeros elsewhere. None: x itself."""
    if real_N is None:
        return x_NX
    return x_NX.new_zeros(num_tokens, *x_NX.shape[1:]).index_copy_(0, real_N, x_NX)

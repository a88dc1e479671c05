"""Which token attends to which: attention within packed sequences and over a cache, by PyTorch's own SDPA.

Each object here is an `Attend` (see decoder.py) made for one forward. It knows no weights. Faster kernels
lie in cpu_kernels.py and compiled_attention.py and must agree with what is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.models import cpu_kernels
from tlt.models.decoder import ModelConfig
from tlt.uploads import upload

if TYPE_CHECKING:
    from tlt.models.compiled_attention import CompiledAttention

FEW_TOKENS, SDPA_ADVANTAGE = 16, 4 / 3
"""New tokens of a sequence up to which compiled loops are always faster than SDPA, and how much faster
SDPA multiplies beyond (benchmarks/results/attention.md)."""


def keep_to_steady_kernels() -> None:
    """Lets PyTorch do without cuDNN's attention in this process: that plans for some hundred milliseconds
    wherever a shape is new, as that of every decoding step is."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def takes_no_groups(q: Tensor) -> bool:
    """Returns whether query heads that share keys would cost a GPU the scores of all pairs of tokens: of
    PyTorch's kernels that do without these, those for float32 want a key for every query head."""
    return q.is_cuda and q.dtype not in (torch.bfloat16, torch.float16)


class PackedCausal:
    """Causal attention for several sequences in one flat batch, none of which sees another (training,
    recomputation, prefill).

    It runs sequence by sequence: no mask, no padding, and a sequence's result does not depend on the
    others by construction.
    """

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.cat([torch.arange(length, device=device) for length in self.lengths])

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        return torch.cat([self._causal(qkv_TSD) for qkv_TSD in qkv_NSD.split(self.lengths)])

    def _causal(self, qkv_TSD: Tensor) -> Tensor:
        """Returns the attention [T, H·D] of one sequence."""
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = (part.transpose(0, 1)[None] for part in qkv_TSD.split(heads, dim=1))
        is_grouped = self.num_heads != self.num_kv_heads
        if is_grouped and takes_no_groups(q):
            group, is_grouped = self.num_heads // self.num_kv_heads, False
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        out_1HTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        return out_1HTD[0].transpose(0, 1).flatten(1)


class SharedPrompts(PackedCausal):
    """Causal attention for families in one flat batch: sequences that begin with the same prompt, which lies
    there once.

        family    [prompt] [own tokens] [own tokens] …      each sequence sees the prompt and itself

    families: per family, the length of its prompt and those of its sequences without it, which may be 0.
        Every sequence runs whole, behind a copy of the prompt's queries, keys and values: that repeats a
        little of attention, and no matrix product.
    """

    def __init__(self, config: ModelConfig, families: Sequence[tuple[int, Sequence[int]]]) -> None:
        super().__init__(config, [part for prompt, own in families for part in (prompt, *own)])
        self.families = [(prompt, list(own)) for prompt, own in families]

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.cat(
            [
                torch.arange(start, start + length, device=device)
                for prompt, own in self.families
                for start, length in ((0, prompt), *((prompt, length) for length in own))
            ]
        )

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        parts = iter(qkv_NSD.split(self._runs()))
        outputs = []
        for prompt, own in self.families:
            first_TSD = next(parts)
            outputs.append(self._causal(first_TSD))
            for _ in own[1:]:
                outputs.append(self._causal(torch.cat([first_TSD[:prompt], next(parts)]))[prompt:])
        return torch.cat(outputs)

    def _runs(self) -> list[int]:
        """Returns the lengths of what lies together: a prompt and its first sequence, and each further
        sequence."""
        return [length for prompt, own in self.families for length in (prompt + sum(own[:1]), *own[1:])]


class Unrolled(PackedCausal):
    """Packed causal attention of a drafter that is trained on several of its own steps, with one call per
    step.

    In the first step pair t sees the pairs up to t of its sequence. In each later step it continues its
    own draft: it sees those first pairs, and itself in every later step up to this one. That is what a
    draft from position t sees (HASS, arXiv 2408.15766, §3.2; EAGLE-3, arXiv 2503.01840, §3.2).
    """

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        super().__init__(config, lengths)
        self.first_NHD: tuple[Tensor, Tensor] | None = None
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        q_NHD, k_NKD, v_NKD = qkv_NSD.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        group = self.num_heads // self.num_kv_heads
        k_NHD, v_NHD = (x.repeat_interleave(group, dim=1) for x in (k_NKD, v_NKD))
        if self.first_NHD is None:
            self.first_NHD = k_NHD, v_NHD
            return super().__call__(layer, qkv_NSD)
        self.own_keys.append(k_NHD)
        self.own_values.append(v_NHD)
        whole = (
            q_NHD,
            *self.first_NHD,
            torch.stack(self.own_keys, dim=1),
            torch.stack(self.own_values, dim=1),
        )
        attend = cpu_kernels.CausalAndOwn.apply if cpu_kernels.can_fuse(q_NHD) else causal_and_own
        outputs = []
        for q_THD, k_THD, v_THD, own_k_TIHD, own_v_TIHD in zip(
            *(x.split(self.lengths) for x in whole), strict=True
        ):
            q_HTD, k_HTD, v_HTD = (x.transpose(0, 1) for x in (q_THD, k_THD, v_THD))
            own_k_IHTD, own_v_IHTD = (x.permute(1, 2, 0, 3) for x in (own_k_TIHD, own_v_TIHD))
            out_HTD = attend(q_HTD, k_HTD, v_HTD, own_k_IHTD, own_v_IHTD)
            outputs.append(out_HTD.transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def causal_and_own(
    q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, own_k_IHTD: Tensor, own_v_IHTD: Tensor
) -> Tensor:
    """Returns attention [H, T, D] in which query t sees the keys up to t, and the keys at t of each of the
    I own steps."""
    q_HTD = q_HTD * q_HTD.shape[-1] ** -0.5
    length = q_HTD.shape[1]
    future_TT = torch.ones(length, length, dtype=torch.bool, device=q_HTD.device).triu_(1)
    scores_HTT = (q_HTD @ k_HTD.transpose(1, 2)).masked_fill(future_TT, float("-inf"))
    own_HTI = (q_HTD * own_k_IHTD).sum(-1).movedim(0, -1)
    weights_HTL = torch.cat([scores_HTT, own_HTI], dim=-1).softmax(dim=-1)
    own_IHT1 = weights_HTL[..., length:].movedim(-1, 0)[..., None]
    return weights_HTL[..., :length] @ v_HTD + (own_IHT1 * own_v_IHTD).sum(0)


class StoringPrefill(SharedPrompts):
    """`SharedPrompts` that also writes the keys and values of sequence i to cache slot slots[i], from
    position 0 on."""

    def __init__(
        self,
        config: ModelConfig,
        families: Sequence[tuple[int, Sequence[int]]],
        layers_SKLD: Sequence[Tensor],
        slots: Sequence[int],
    ) -> None:
        super().__init__(config, families)
        self.layers, self.slots = layers_SKLD, list(slots)

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        kv_SKLD, slots = self.layers[layer], iter(self.slots)
        parts = iter(qkv_NSD[:, self.num_heads :].transpose(0, 1).split(self._runs(), dim=1))
        for prompt, own in self.families:
            first_KTD, first = next(parts), next(slots)
            kv_SKLD[first, :, : first_KTD.shape[1]] = first_KTD
            for _ in own[1:]:
                slot, own_KTD = next(slots), next(parts)
                kv_SKLD[slot, :, :prompt] = first_KTD[:, :prompt]
                kv_SKLD[slot, :, prompt : prompt + own_KTD.shape[1]] = own_KTD
        return super().__call__(layer, qkv_NSD)


@cache
def compiled_loops() -> ModuleType | None:
    """Returns compiled_attention.py; None where Numba, which compiles it, is missing: SDPA then attends."""
    try:
        from tlt.models import compiled_attention
    except ImportError:
        return None
    return compiled_attention


def prepare_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Does before the first forward what it would else wait for: on a CPU the loops for this type are
    loaded, or compiled where nobody has before."""
    if device.type != "cpu":
        keep_to_steady_kernels()
    elif (loops := compiled_loops()) is not None and dtype in loops.DTYPES:
        loops.compiled(dtype)


def cached(
    config: ModelConfig,
    layers_SKLD: Sequence[Tensor],
    columns_BT: Tensor,
    length: int,
    mask_BTL: Tensor | None,
    lengths: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
) -> Cached | CompiledAttention:
    """Returns cached attention for a batch: on a CPU by compiled loops, where they are faster. Other
    arguments are `Cached`'s.

    lengths: per sequence, the columns that any of its new tokens may see; None: `length` of each.
    """
    B, T = columns_BT.shape
    rows = list(zip(counts or [T] * B, lengths or [length] * B, strict=True))
    is_faster = T <= FEW_TOKENS or SDPA_ADVANTAGE * sum(t * n for t, n in rows) < B * T * length
    loops = compiled_loops() if is_faster and columns_BT.device.type == "cpu" else None
    if loops is None or layers_SKLD[0].dtype not in loops.DTYPES:
        return Cached(config, layers_SKLD, columns_BT, length, mask_BTL, counts)
    mask_BTL = None if T == 1 and lengths is not None else mask_BTL  # a single token sees all of its columns
    real_N = None if counts is None else real_tokens(counts, T, columns_BT.device)
    attend: CompiledAttention = loops.CompiledAttention(
        config.num_heads, layers_SKLD, columns_BT, mask_BTL, rows, real_N
    )
    return attend


class Cached:
    """Attention of T new tokens for each of B sequences over their cache, to which it adds their keys and
    values first.

    layers_SKLD: per layer, [slots, 2 × kv heads, length, head dim], keys before values. The sequences lie in
        slots 0..B-1.
    columns_BT: the places of the new entries.
    length: entries that are read of each sequence.
    mask_BTL: is added to the scores and says which entries each new token sees; None: all of `length`.
    counts: new tokens of each sequence, where some have fewer than T; input and output then have no padding.
        None: all have T.

    Query heads that share keys are folded into the query length.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers_SKLD: Sequence[Tensor],
        columns_BT: Tensor,
        length: int,
        mask_BTL: Tensor | None,
        counts: Sequence[int] | None = None,
    ) -> None:
        self.layers, self.length = layers_SKLD, length
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
        self.mask = None if mask_BTL is None else mask_BTL.repeat(1, self.group, 1)[:, None]

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        cache_SKLD = self.layers[layer]
        q_NHD, new_NKD = qkv_NSD.tensor_split([self.num_heads], dim=1)
        cache_SKLD[self.rows, :, self.columns] = new_NKD.view(*self.columns.shape, *new_NKD.shape[1:])
        return self._attend(q_NHD, cache_SKLD)

    def _attend(self, q_NHD: Tensor, cache_SKLD: Tensor) -> Tensor:
        B, T, K, G = self.batch, self.num_new, self.num_kv_heads, self.group
        live_BKLD = cache_SKLD[:B, :, : self.length]
        q_BKTD = (
            pad(q_NHD, self.real_N, B * T)
            .view(B, T, K, G, -1)
            .permute(0, 2, 3, 1, 4)
            .reshape(B, K, G * T, -1)
        )
        out_BKTD = F.scaled_dot_product_attention(
            q_BKTD, live_BKLD[:, :K], live_BKLD[:, K:], attn_mask=self.mask
        )
        out_NC = out_BKTD.view(B, K, G, T, -1).permute(0, 3, 1, 2, 4).reshape(B * T, -1)
        return out_NC if self.real_N is None else out_NC.index_select(0, self.real_N)


def real_tokens(counts: Sequence[int], num_columns: int, device: torch.device) -> Tensor:
    """Returns int64[sum of counts]: where the first counts[b] of `num_columns` tokens of sequence b lie in
    a flat batch."""
    return upload([b * num_columns + i for b, count in enumerate(counts) for i in range(count)], device)


def pad(x_NX: Tensor, real_N: Tensor | None, num_tokens: int) -> Tensor:
    """Returns the flat batch [num_tokens, X]: the rows of x at the places `real_N`, zeros elsewhere; None:
    x as it is."""
    if real_N is None:
        return x_NX
    return x_NX.new_zeros(num_tokens, *x_NX.shape[1:]).index_copy_(0, real_N, x_NX)

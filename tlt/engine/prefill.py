"""Reading what a sequence starts from: its prompt, or prompt and response so far. Every distinct text is read once, all but its
last token, in forwards of bounded size, and copied to the other slots that start from it.

    short texts   [ text text text ] [ text text ]        packed, up to PREFILL_TOKENS in a forward
    a long one    [ first part      ] [part] [part] …     each later part attends to the cache

Knows neither requests nor what is captured for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tlt.engine.scheduler import Admission
from tlt.models import kv_cache
from tlt.models.attention import Cached, StoringPrefill
from tlt.models.kv_cache import Cache, prefill_groups
from tlt.models.packed import PackedTransformer
from tlt.speculative.tree import chain_mask
from tlt.uploads import upload

_PART_TOKENS = 512
"""Tokens of a later part of a long text. Its mask has a row for each of them and for each query head that shares a key: at 7B
and 32k tokens 235 MiB in bf16."""

OnRead = Callable[[tuple[int, ...], int, Tensor], None]
"""Receives (slots, first position, captured_TF) of tokens that these slots have read."""


@torch.inference_mode()
def prefill(
    model: PackedTransformer, cache: Cache, admissions: Sequence[Admission], capture: tuple[int, ...], on_read: OnRead
) -> tuple[int, int]:
    """Reads the admitted texts into their slots, for which the cache has room; returns (tokens read, forwards that this took).
    capture: see `forward_capturing`."""
    limit, num_tokens, num_forwards = kv_cache.PREFILL_TOKENS, 0, 0
    for group in prefill_groups([a for a in admissions if len(a.tokens) > 1], lambda a: len(a.tokens)):
        lengths = [min(len(a.tokens) - 1, limit) for a in group]
        attend = StoringPrefill(model.config, lengths, cache.layers, [a.slots[0] for a in group])
        tokens = [t for a, length in zip(group, lengths, strict=True) for t in a.tokens[:length]]
        positions_N = attend.positions(model.device)
        captured_NF = model.forward_capturing(upload(tokens, model.device), positions_N, attend, capture)[1]
        num_tokens, num_forwards = num_tokens + len(tokens), num_forwards + 1
        for admission, captured_TF in zip(group, captured_NF.split(lengths), strict=True):
            on_read(admission.slots, 0, captured_TF)
            for start, later_TF in _read_on(model, cache, admission, capture, limit):
                on_read(admission.slots, start, later_TF)
                num_tokens, num_forwards = num_tokens + later_TF.shape[0], num_forwards + 1
            cache.fork(admission.slots[0], admission.slots[1:], len(admission.tokens) - 1)
    return num_tokens, num_forwards


def _read_on(
    model: PackedTransformer, cache: Cache, admission: Admission, capture: tuple[int, ...], start: int
) -> Iterator[tuple[int, Tensor]]:
    """Reads a text from position `start` on, part by part; yields each part's position and what was captured."""
    slot, num_read = admission.slots[0], len(admission.tokens) - 1
    layers = [layer[slot : slot + 1] for layer in cache.layers]
    for first in range(start, num_read, _PART_TOKENS):
        end = min(first + _PART_TOKENS, num_read)
        columns_1T = torch.arange(first, end, device=model.device)[None]
        attend = Cached(model.config, layers, columns_1T, end, chain_mask(columns_1T, end, model.dtype))
        tokens_T = upload(admission.tokens[first:end], model.device)
        yield first, model.forward_capturing(tokens_T, columns_1T[0], attend, capture)[1]

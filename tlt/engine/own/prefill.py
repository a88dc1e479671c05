"""Prefill: the target reads prompts, or prompts with unfinished responses, all but the last token. A distinct
text is read once for all its slots; a common beginning, such as a chat template, once for all texts.

    short texts   [ beginning rest rest rest ] [ text text ]      packed, up to PREFILL_TOKENS in a forward
    a long one    [ first part      ] [part] [part] …             each later part attends to the cache
    parked ones   ( kept ) [ said ]  ( kept ) [ said ]            in neighbouring slots: in one forward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tlt.base.uploads import upload
from tlt.engine.own.scheduler import Admission
from tlt.models import kv_cache
from tlt.models.attention import cached, cached_trees, storing_prefill
from tlt.models.kv_cache import Cache, prefill_groups
from tlt.models.target import Target
from tlt.speculation.law.tree import chain, chain_mask, layout

_PART_TOKENS = kv_cache.MOST_WRITTEN
"""Bounds the mask, with a row per token and per query head that shares a key: 235 MiB in bf16 at 7B and 32k
tokens."""

MIN_SHARED = 8
"""Common tokens from which on texts are read as one family."""

OnRead = Callable[[tuple[int, ...], int, Tensor], None]
"""Receives (slots, first position, captured_TF)."""


@torch.inference_mode()
def prefill(
    target: Target,
    cache: Cache,
    admissions: Sequence[Admission],
    capture: tuple[int, ...],
    on_read: OnRead,
) -> None:
    """The cache must have room. capture: see `forward_capturing`."""
    new = [a for a in admissions if len(a.tokens) > 1 and not a.num_read]
    for group in prefill_groups(new, lambda a: len(a.tokens)):
        for admission, captured_TF in _read_first(target, cache, group, capture):
            on_read(admission.slots, 0, captured_TF)
            for start, later_TF in _read_on(target, cache, admission, capture, kv_cache.PREFILL_TOKENS):
                on_read(admission.slots, start, later_TF)
            cache.fork(admission.slots[0], admission.slots[1:], len(admission.tokens) - 1)
    for group in _neighbours([a for a in admissions if a.num_read]):
        if len(group) > 1:
            for admission, said_TF in _read_together(target, cache, group, capture):
                on_read(admission.slots, admission.num_read, said_TF)
            continue
        (admission,) = group
        for start, later_TF in _read_on(target, cache, admission, capture, admission.num_read):
            on_read(admission.slots, start, later_TF)
        cache.fork(admission.slots[0], admission.slots[1:], len(admission.tokens) - 1)


def _read_first(
    target: Target, cache: Cache, group: Sequence[Admission], capture: tuple[int, ...]
) -> Iterator[tuple[Admission, Tensor]]:
    """Reads up to PREFILL_TOKENS of each text in one forward. Yields texts and features."""
    texts = [a.tokens[:-1][: kv_cache.PREFILL_TOKENS] for a in group]
    shared = shared_beginnings(texts)
    families = [(length, [len(texts[i]) - length for i in members]) for length, members in shared]
    slots = [group[i].slots[0] for _, members in shared for i in members]
    attend = storing_prefill(target.config, families, cache.layers, slots)
    parts = [
        part
        for length, (first, *others) in shared
        for part in (texts[first], *(texts[i][length:] for i in others))
    ]
    tokens_N = upload([token for part in parts for token in part], target.device)
    captured_NF = target.forward_capturing(tokens_N, attend.positions(target.device), attend, capture)[1]
    captured = iter(captured_NF.split([len(part) for part in parts]))
    for length, (first, *others) in shared:
        first_TF = next(captured)
        yield group[first], first_TF
        for i in others:
            yield group[i], torch.cat([first_TF[:length], next(captured)])


def shared_beginnings(texts: Sequence[tuple[int, ...]]) -> list[tuple[int, list[int]]]:
    """Families of texts as (length of the common beginning, indices), of a text alone its own. Dynamic
    programming over the sorted texts saves most tokens."""
    order = sorted(range(len(texts)), key=texts.__getitem__)
    with_next = [_num_common(texts[i], texts[j]) for i, j in pairwise(order)]
    # by the number of texts in order: tokens saved, and (start, length) of the last family
    saved, chosen = [0], [(0, 0)]
    for end in range(1, len(order) + 1):
        best, length = saved[-1], len(texts[order[end - 1]])
        family = (end - 1, length)
        for start in range(end - 2, -1, -1):
            length = min(length, with_next[start])
            if length < MIN_SHARED:
                break
            if (total := saved[start] + length * (end - 1 - start)) > best:
                best, family = total, (start, length)
        saved.append(best)
        chosen.append(family)
    families: list[tuple[int, list[int]]] = []
    end = len(order)
    while end:
        start, length = chosen[end]
        families.append((length, order[start:end]))
        end = start
    return families[::-1]


def _num_common(text: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(text, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))


def _neighbours(parked: Sequence[Admission]) -> list[list[Admission]]:
    """Groups in neighbouring slots, one each, whose rests have _PART_TOKENS at most, padding included."""
    groups: list[list[Admission]] = []
    for admission in parked:
        group = [*groups[-1], admission] if groups else [admission]
        slots = [slot for each in group for slot in each.slots]
        is_row = len(slots) == len(group) and slots[-1] - slots[0] == len(slots) - 1
        rests = [each.num_left for each in group]
        if is_row and min(rests) and len(group) * max(rests) <= _PART_TOKENS:
            groups[-1:] = [group]
        else:
            groups.append([admission])
    return groups


def _read_together(
    target: Target, cache: Cache, group: Sequence[Admission], capture: tuple[int, ...]
) -> Iterator[tuple[Admission, Tensor]]:
    """Reads the rests of parked texts in one forward. Yields texts and features."""
    first, counts = group[0].slots[0], [admission.num_left for admission in group]
    layers = [layer[first : first + len(group)] for layer in cache.layers]
    rests = [(*admission.tokens[admission.num_read : -1], *[0] * max(counts)) for admission in group]
    rows = chain(upload([rest[: max(counts)] for rest in rests], target.device), counts)
    length = max(len(admission.tokens) for admission in group) - 1
    nodes = layout(rows, [admission.num_read for admission in group], target.dtype, length)
    attend = cached_trees(target.config, layers, nodes)
    tokens_N, positions_N = rows.tokens_BN.flatten(), nodes.positions_BN.flatten()
    if attend.real_N is not None:
        tokens_N, positions_N = tokens_N[attend.real_N], positions_N[attend.real_N]
    captured_NF = target.forward_capturing(tokens_N, positions_N, attend, capture)[1]
    yield from zip(group, captured_NF.split(counts), strict=True)


def _read_on(
    target: Target, cache: Cache, admission: Admission, capture: tuple[int, ...], start: int
) -> Iterator[tuple[int, Tensor]]:
    """Yields position and features of each part from `start` on."""
    slot, num_read = admission.slots[0], len(admission.tokens) - 1
    layers = [layer[slot : slot + 1] for layer in cache.layers]
    for first in range(start, num_read, _PART_TOKENS):
        end = min(first + _PART_TOKENS, num_read)
        columns_1T = torch.arange(first, end, device=target.device)[None]
        attend = cached(target.config, layers, columns_1T, end, chain_mask(columns_1T, end, target.dtype))
        tokens_T = upload(admission.tokens[first:end], target.device)
        yield first, target.forward_capturing(tokens_T, columns_1T[0], attend, capture)[1]

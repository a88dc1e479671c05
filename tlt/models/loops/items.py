"""The loops of attention.py.

    an item: up to 16 new tokens of a sequence, and the query heads that share a key head
      64 keys at a time ─▶ panels (products.py) ─▶ scores ─▶ online softmax (arXiv 1805.02867)
                                                            └─▶ weighted sums of the values

All arithmetic is float32.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import carray, njit  # type: ignore[attr-defined]  # carray is public and not listed

from tlt.base import loops
from tlt.base.loops import REORDERED, exp_of, float32_at, int64_at, uint16_at
from tlt.models.loops.blocks import LANES, multiply_panels
from tlt.models.loops.numbers import narrow, widen
from tlt.models.loops.panels import fill_panels, turn_into_panels

KEYS_AT_ONCE = 64

TOKENS_AT_ONCE = 16
"""Of an item. Their scores and sums stay in the fastest cache."""

_F32, _U64 = np.float32, np.uint64
_1, _2, _3, _4, _KEYS, _LANES = (_U64(i) for i in (1, 2, 3, 4, KEYS_AT_ONCE, LANES))
"""Indices are unsigned: Numba checks signed ones for negative values, which prevents vectorization."""
_2F = _F32(2)
_NOTHING, _LOWEST, _NO_WEIGHT = _F32(-math.inf), _F32(-1e30), _F32(-126 * math.log(2))

_FIRST, COUNT, SEEN, _AT, _PLACE, _ROOM = (_U64(i) for i in range(6))
ROW = _U64(6)
"""Numbers of a row: (first, count, seen, at, place, room). Tokens first … first + count - 1 of the flat batch
see `seen` columns of their sequence. at: of the first, in columns, positions and mask. place: of the
sequence, in slots of the cache; where it has no slots (capacity 0), in columns, and the sequence has `room`
of them."""

_ADDRESSES = ("multiply", "qkv", "layer", "out", "columns", "rows", "mask", "positions", "parents", "sinks")
_SIZES = ("num_heads", "num_kv_heads", "head_dim", "capacity", "most_new", "mask_length", "window")
_COUNTS = ("tree_size", "num_rows", "num_stored", "is_causal", "is_storing")
_FACTORS = ("scale", "softcap")
_KINDS = {"i8": _ADDRESSES, "u8": (*_SIZES, *_COUNTS), "f8": _FACTORS}
CALL = np.dtype([*loops.HEAD, *((name, kind) for kind, names in _KINDS.items() for name in names)])
"""multiply: `compiled_multiply` of float32. Zero stands for no mask, parents, sinks, window or softcap. The
first `num_rows` rows attend. num_stored: rows that are stored before any attends; 0: a row stores its own
tokens. is_causal: a token sees the columns up to its own."""


def compiled(dtype: torch.dtype) -> int:
    return loops.compiled(_attend_float32 if dtype == torch.float32 else _attend_bfloat16)


def _attend_float32(at):  # type: ignore
    call = call_at(at)
    _attend(at, call, (float32_at(call.qkv), float32_at(call.layer), float32_at(call.out)))


def _attend_bfloat16(at):  # type: ignore
    call = call_at(at)
    _attend(at, call, (uint16_at(call.qkv), uint16_at(call.layer), uint16_at(call.out)))


# ── items ───────────────────────────────────────────────────────────────────────────────────────────────────


@njit(inline="always")
def _attend(at, call, arrays):  # type: ignore
    room = workspace(call)
    work = np.int64(room.ctypes.data)
    while True:
        item = loops.take_item(at)
        if item >= call.num_items:
            break
        row, kv_head = _U64(item) // call.num_kv_heads, _U64(item) % call.num_kv_heads
        if call.is_storing:
            store_item(call, arrays, row, kv_head)
            continue
        if not call.num_stored:
            store_item(call, arrays, row, kv_head)
        _attend_item(call, arrays, row, kv_head, work)
    room[_U64(0)] = _F32(0)  # it lives until here


def compiled_item(dtype: torch.dtype) -> int:
    """Attends an item: float32 queries, over a cache of this type."""
    return loops.compiled(_item_float32 if dtype == torch.float32 else _item_bfloat16)


_ITEM = np.dtype([(name, "i8") for name in ("call", "qkv", "layer", "out", "work", "row", "kv_head")])


def _item_float32(at):  # type: ignore
    item = carray(loops.as_pointer(at), 1, _ITEM)[0]
    arrays = float32_at(item.qkv), float32_at(item.layer), float32_at(item.out)
    _attend_item(call_at(item.call), arrays, _U64(item.row), _U64(item.kv_head), item.work)


def _item_bfloat16(at):  # type: ignore
    item = carray(loops.as_pointer(at), 1, _ITEM)[0]
    arrays = float32_at(item.qkv), uint16_at(item.layer), float32_at(item.out)
    _attend_item(call_at(item.call), arrays, _U64(item.row), _U64(item.kv_head), item.work)


@njit(inline="always")
def call_at(address):  # type: ignore
    return carray(loops.as_pointer(address), 1, CALL)[0]


@njit(nogil=True, cache=True)
def workspace(call):  # type: ignore
    num_queries, dim = call.most_new * (call.num_heads // call.num_kv_heads), call.head_dim
    return np.zeros(num_queries * (dim + _width(dim) + _KEYS + _2) + _KEYS * _width(dim), np.float32)


@njit(nogil=True, cache=True)
def _parts_of(call, work):  # type: ignore
    """Returns (queries, scores, sums, largest scores, totals, panels)."""
    num_queries, dim = call.most_new * (call.num_heads // call.num_kv_heads), call.head_dim
    scores = work + np.int64(_4 * num_queries * dim)
    sums = scores + np.int64(_4 * num_queries * _KEYS)
    largest = sums + np.int64(_4 * num_queries * _width(dim))
    totals = largest + np.int64(_4 * num_queries)
    panels = totals + np.int64(_4 * num_queries)
    return (
        _floats(work, num_queries * dim),
        _floats(scores, num_queries * _KEYS),
        _floats(sums, num_queries * _width(dim)),
        _floats(largest, num_queries),
        _floats(totals, num_queries),
        _floats(panels, _KEYS * _width(dim)),
    )


@njit(inline="always")
def _floats(address, size):  # type: ignore
    return carray(loops.as_pointer(address), np.int64(size), np.float32)


@njit(inline="always")
def _width(dim):  # type: ignore
    return (dim + _LANES - _1) // _LANES * _LANES


@njit(inline="always")
def _keys_at(call, rows, row, kv_head):  # type: ignore
    """Returns (where the key head begins, numbers to its values, columns)."""
    num_heads, dim = _2 * call.num_kv_heads, call.head_dim
    place, columns = _U64(rows[row + _PLACE]), call.capacity
    at = place * num_heads * max(columns, _1) * dim
    if columns == _U64(0):
        columns = _U64(rows[row + _ROOM])
    return at + kv_head * columns * dim, call.num_kv_heads * columns * dim, columns


@njit(nogil=True, cache=True)
def store_item(call, arrays, row, kv_head):  # type: ignore
    qkv, layer, _ = arrays
    rows, row = int64_at(call.rows), row * ROW
    keys_at, to_values, capacity = _keys_at(call, rows, row, kv_head)
    dim, step = call.head_dim, call.num_heads + _2 * call.num_kv_heads
    columns, first, at = int64_at(call.columns), _U64(rows[row + _FIRST]), _U64(rows[row + _AT])
    for i in range(_U64(rows[row + COUNT])):
        key = ((first + i) * step + call.num_heads + kv_head) * dim
        value = key + call.num_kv_heads * dim
        target = keys_at + _U64(columns[at + i]) % capacity * dim
        for d in range(dim):
            layer[target + d] = narrow(widen(qkv[key + d]), layer[target + d])
            layer[target + to_values + d] = narrow(widen(qkv[value + d]), layer[target + d])


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_item(call, arrays, row, kv_head, work):  # type: ignore
    qkv, layer, out = arrays
    work = _parts_of(call, work)
    queries, _, sums, largest, totals, _ = work
    dim, rows, row = call.head_dim, int64_at(call.rows), row * ROW
    first, num_new, num_keys = _U64(rows[row]), _U64(rows[row + COUNT]), _U64(rows[row + SEEN])
    keys_at, to_values, capacity = _keys_at(call, rows, row, kv_head)
    group, at = call.num_heads // call.num_kv_heads, _U64(rows[row + _AT])
    num_queries = num_new * group
    for i in range(num_new):
        head = ((first + i) * (call.num_heads + _2 * call.num_kv_heads) + kv_head * group) * dim
        _load(qkv, head, group * dim, queries, i * group * dim)
    _scale(queries, _U64(0), num_queries * dim, _F32(call.scale))
    sums[:], totals[:], largest[:] = _F32(0), _F32(0), _LOWEST
    if call.sinks:
        sinks = float32_at(call.sinks)
        for query in range(num_queries):
            largest[query], totals[query] = sinks[kv_head * group + query % group], _F32(1)
    if call.tree_size:
        num_keys = _U64(int64_at(call.columns)[at - at % call.tree_size]) // _KEYS * _KEYS  # before the root
    for start in range(_first_start(call, at, num_new), num_keys, _KEYS):
        count = min(_KEYS, num_keys - start)
        keys = keys_at + start % capacity * dim  # of a ring: blocks of 64 lie whole in it
        _attend_keys(call, (layer, keys, layer, keys + to_values), (at, num_new), start, count, group, work)
    for i in range(num_new if call.tree_size else _U64(0)):
        one = _of_query(work, i * group, dim)
        _attend_path(call, layer, (keys_at, to_values, capacity), at + i, num_keys, group, one)
    for query in range(num_queries):
        head = ((first + query // group) * call.num_heads + kv_head * group + query % group) * dim
        _unload(sums, query * _width(dim), dim, _F32(1) / totals[query], out, head)


@njit(nogil=True, cache=True)
def _attend_keys(call, source, tokens, start, count, group, work):  # type: ignore
    """Adds `count` keys from position `start` on. source: (array, place) of keys, and of values."""
    queries, scores, sums, largest, totals, panels = work
    keys, keys_at, values, values_at = source
    at, num_new = tokens
    num_queries, dim = num_new * group, call.head_dim
    turn_into_panels(keys, keys_at, count, dim, panels)
    _multiply(call, (queries, dim), num_queries, dim, panels, count, (scores, _KEYS), 0)
    if call.softcap > 0.0:
        _cap(scores, num_queries, _F32(call.softcap))
    if call.window:
        _hide_far(call, scores, num_queries, group, count, at, start)
    _hide(call, scores, num_queries, group, count, at, start)
    _weigh(scores, num_queries, _width(dim), sums, largest, totals)
    fill_panels(values, values_at, count, dim, panels)
    _multiply(call, (scores, _KEYS), num_queries, count, panels, dim, (sums, _width(dim)), 1)


@njit(inline="always")
def _multiply(call, x, num_rows, num_in, panels, num_out, out, adds):  # type: ignore
    rows, into = (x[0].ctypes.data, x[1]), (out[0].ctypes.data, out[1])
    weights, num_panels = (panels.ctypes.data, call.multiply), (num_out + _LANES - _1) // _LANES
    multiply_panels(rows, num_rows, num_in, weights, 0, num_panels, into, adds)


@njit(inline="always")
def _of_query(work, query, dim):  # type: ignore
    queries, scores, sums, largest, totals, panels = work
    return (
        queries[query * dim :],
        scores[query * _KEYS :],
        sums[query * _width(dim) :],
        largest[query:],
        totals[query:],
        panels,
    )


@njit(nogil=True, cache=True)
def _attend_path(call, layer, places, at, start, group, work):  # type: ignore
    """Of a tree's node, adds the sequence from column `start` on, ancestors and itself as if they followed
    one another."""
    keys_at, to_values, capacity = places
    columns, positions = int64_at(call.columns), int64_at(call.positions)
    parents, root = int64_at(call.parents), at - at % call.tree_size
    prefix, end = _U64(columns[root]), _U64(positions[at]) + _1
    path = np.empty(end - start, np.int64)
    node = np.int64(at - root)
    for place in range(end - start):
        position = end - _1 - place
        if position < prefix:
            path[position - start] = np.int64(position)
        else:
            path[position - start] = columns[root + _U64(node)]
            node = parents[root + _U64(node)]
    dim = call.head_dim
    keys, values = np.empty(_KEYS * dim, layer.dtype), np.empty(_KEYS * dim, layer.dtype)
    for first in range(start, end, _KEYS):
        count = min(_KEYS, end - first)
        for j in range(count):
            source = keys_at + _U64(path[first - start + j]) % capacity * dim
            for d in range(dim):
                keys[j * dim + d] = layer[source + d]
                values[j * dim + d] = layer[source + to_values + d]
        _attend_keys(call, (keys, _U64(0), values, _U64(0)), (at, _1), first, count, group, work)


@njit(nogil=True, cache=True)
def _first_start(call, at, num_new):  # type: ignore
    if not call.window:
        return _U64(0)
    positions = int64_at(call.positions)
    first = positions[at]
    for i in range(num_new):
        first = min(first, positions[at + i])
    return _U64(max(first - np.int64(call.window) + 1, 0)) // _KEYS * _KEYS


@njit(nogil=True, cache=True)
def _hide(call, scores, num_queries, group, count, at, start):  # type: ignore
    columns = int64_at(call.columns)
    for query in range(num_queries):
        token, seen = at + query // group, count
        if call.is_causal and not call.tree_size:
            seen = min(count, _U64(max(columns[token] + 1 - np.int64(start), 0)))
        if call.mask_length:
            mask, masked = float32_at(call.mask), token * call.mask_length + start
            for j in range(seen):
                scores[query * _KEYS + j] += mask[masked + j]
        for j in range(seen, _KEYS):
            scores[query * _KEYS + j] = _NOTHING


@njit(nogil=True, cache=True, fastmath=REORDERED, error_model="numpy")
def _cap(scores, num_rows, softcap):  # type: ignore
    """softcap · tanh(score / softcap), by exp(-|2x|)."""
    for at in range(num_rows * _KEYS):
        small = exp_of(-abs(_2F * scores[at] / softcap))
        capped = softcap * (_F32(1) - small) / (_F32(1) + small)
        scores[at] = -capped if scores[at] < _F32(0) else capped


@njit(nogil=True, cache=True)
def _hide_far(call, scores, num_queries, group, count, at, start):  # type: ignore
    positions = int64_at(call.positions)
    for query in range(num_queries):
        position = _U64(positions[at + query // group])
        if position >= start + call.window:
            for j in range(min(count, position - call.window + _1 - start)):
                scores[query * _KEYS + j] = _NOTHING


@njit(nogil=True, cache=True)
def _weigh(scores, num_rows, width, sums, largest, totals):  # type: ignore
    """Replaces scores s by exp(s - largest so far), and rescales `sums` and `totals`."""
    for row in range(num_rows):
        found = _largest(scores, row * _KEYS)
        if found > largest[row]:
            factor = _F32(math.exp(largest[row] - found))
            _scale(sums, row * width, width, factor)
            totals[row], largest[row] = totals[row] * factor, found
        totals[row] += _to_weights(scores, row * _KEYS, largest[row])


@njit(nogil=True, cache=True)
def _largest(scores, at):  # type: ignore
    """Four maxima side by side, since each comparison waits for the one before it."""
    a, b, c, d = _LOWEST, _LOWEST, _LOWEST, _LOWEST
    for j in range(at, at + _KEYS, _4):
        a, b = max(a, scores[j]), max(b, scores[j + _1])
        c, d = max(c, scores[j + _2]), max(d, scores[j + _3])
    return max(a, b, c, d)


@njit(nogil=True, cache=True, fastmath=REORDERED)
def _to_weights(scores, at, largest):  # type: ignore
    """Replaces scores s by exp(s - largest), 0 below 2⁻¹²⁶; returns their sum."""
    total = _F32(0)
    for j in range(_KEYS):
        behind = scores[at + j] - largest
        weight = _F32(0) if behind < _NO_WEIGHT else exp_of(behind)
        scores[at + j] = weight
        total += weight
    return total


@njit(nogil=True, cache=True)
def _scale(numbers, at, size, factor):  # type: ignore
    for i in range(size):
        numbers[at + i] *= factor


# ── numbers in memory ───────────────────────────────────────────────────────────────────────────────────────


@njit(nogil=True, cache=True)
def _load(source, at, size, target, to):  # type: ignore
    for i in range(size):
        target[to + i] = widen(source[at + i])


@njit(nogil=True, cache=True)
def _unload(source, at, size, factor, target, to):  # type: ignore
    for i in range(size):
        target[to + i] = narrow(source[at + i] * factor, target[to + i])

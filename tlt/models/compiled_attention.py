"""Attention of few queries over a cache, in compiled loops for CPUs.

    an item: the new tokens of one sequence, and the query heads that share a key head
      64 keys at a time ─▶ scores ─▶ online softmax (arXiv 1805.02867) ─▶ weighted sums of the values

attention.py is the reference. All arithmetic is float32. To the last bit, a query's result does not depend on
other queries, other sequences or keys that it does not see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types  # type: ignore[attr-defined]  # carray is public and not listed
from numba.extending import overload
from torch import Tensor

from tlt.base import loops
from tlt.base.loops import REORDERED, exp_of, float32_at, int64_at, uint16_at
from tlt.models.attention_form import PLAIN, AttentionForm

KEYS_AT_ONCE = 64

PRODUCTS_PER_THREAD = 100_000
"""Multiplications that justify another thread, which takes some microseconds to wake."""

LOOP_DTYPES = (torch.float32, torch.bfloat16)

_F32, _U32, _U64 = np.float32, np.uint32, np.uint64
_1, _2, _3, _4, _64, _128, _KEYS = _U64(1), _U64(2), _U64(3), _U64(4), _U64(64), _U64(128), _U64(KEYS_AT_ONCE)
"""Indices are unsigned: Numba checks signed ones for negative values, which prevents vectorization."""
_2F, _SATURATED = _F32(2), _F32(40)
_NOTHING, _LOWEST, _NO_WEIGHT = _F32(-math.inf), _F32(-1e30), _F32(-126 * math.log(2))

_ADDRESSES = ("qkv", "layer", "out", "columns", "rows", "mask", "positions", "sinks")
_SIZES = ("num_heads", "num_kv_heads", "head_dim", "capacity", "num_new", "mask_length", "window")
_FACTORS = ("scale", "softcap")
_KINDS = {"i8": _ADDRESSES, "u8": _SIZES, "f8": _FACTORS}
CALL = np.dtype([*loops.HEAD, *((name, kind) for kind, names in _KINDS.items() for name in names)])
"""Zero stands for no mask, sinks, window or softcap."""


class CompiledAttention:
    """`attention.Cached` for few new tokens.

    rows: per sequence, (number of new tokens, number of columns that they see).
    mask_BTL: None: they see all of them.
    positions_BT: None: their columns. A window must be longer than a tree is deep.
    """

    def __init__(
        self,
        num_heads: int,
        layers_SKLD: Sequence[Tensor],
        columns_BT: Tensor,
        mask_BTL: Tensor | None,
        rows: Sequence[tuple[int, int]],
        real_N: Tensor | None,
        positions_BT: Tensor | None = None,
    ) -> None:
        self.layers, self.real_N, self.num_heads = layers_SKLD, real_N, num_heads
        self.longest = max(n for _, n in rows)
        self.columns = columns_BT.contiguous()
        self.positions = self.columns if positions_BT is None else positions_BT.contiguous()
        self.form = PLAIN
        self.sinks: Tensor | None = None
        self.mask = None if mask_BTL is None else mask_BTL.float().contiguous()
        ends = np.cumsum([t for t, _ in rows])
        self.rows = np.array([(end - t, t, n) for end, (t, n) in zip(ends, rows, strict=True)], np.int64)
        _, num_kv, capacity, head_dim = layers_SKLD[0].shape
        mask = (0, 0) if self.mask is None else (self.mask.data_ptr(), self.mask.shape[2])
        addresses = (self.columns.data_ptr(), self.rows.ctypes.data, mask[0], self.positions.data_ptr(), 0)
        sizes = (num_heads, num_kv // 2, head_dim, capacity, columns_BT.shape[1], mask[1], 0)
        factors = (head_dim**-0.5, 0.0)
        self.call = np.array([(0, len(rows) * (num_kv // 2), 0, 0, 0, *addresses, *sizes, *factors)], CALL)
        num_products = 2 * sum(t * n for t, n in rows) * num_heads * head_dim
        max_threads = 1 + num_products // PRODUCTS_PER_THREAD
        self.loop = loops.Loop(compiled(layers_SKLD[0].dtype), self.call, max_threads)

    def __call__(self, layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        if form is not self.form:
            self._set(form, qkv_NSD.shape[2])
        capacity = self.layers[layer].shape[2]
        assert form.window or capacity >= self.longest, "a layer without a window keeps all"
        qkv_NSD = qkv_NSD.contiguous()
        out_NC = qkv_NSD.new_empty(len(qkv_NSD), self.num_heads * qkv_NSD.shape[2])
        self.call["qkv"], self.call["out"] = qkv_NSD.data_ptr(), out_NC.data_ptr()
        self.call["layer"], self.call["capacity"] = self.layers[layer].data_ptr(), capacity
        self.loop.run()
        return out_NC

    def _set(self, form: AttentionForm, head_dim: int) -> None:
        self.form = form
        self.sinks = None if form.sinks_H is None else form.sinks_H.detach().float().contiguous()
        self.call["sinks"] = 0 if self.sinks is None else self.sinks.data_ptr()
        self.call["window"], self.call["softcap"] = form.window or 0, form.softcap or 0.0
        self.call["scale"] = head_dim**-0.5 if form.scale is None else form.scale


def compiled(dtype: torch.dtype) -> int:
    return loops.compiled(_attend_float32 if dtype == torch.float32 else _attend_bfloat16)


def _attend_float32(data):  # type: ignore
    call = carray(data, 1, CALL)[0]
    _attend(data, call, (float32_at(call.qkv), float32_at(call.layer), float32_at(call.out)))


def _attend_bfloat16(data):  # type: ignore
    call = carray(data, 1, CALL)[0]
    _attend(data, call, (uint16_at(call.qkv), uint16_at(call.layer), uint16_at(call.out)))


# ── items ───────────────────────────────────────────────────────────────────────────────────────────────────


@njit(nogil=True, cache=True)
def _attend(data, call, arrays):  # type: ignore
    work = workspace(call)
    while True:
        item = loops.take(data)
        if item >= call.num_items:
            return
        sequence, kv_head = _U64(item) // call.num_kv_heads, _U64(item) % call.num_kv_heads
        attend_item(call, arrays, sequence, kv_head, work)


@njit(inline="always")
def call_at(address):  # type: ignore
    return carray(loops.as_pointer(address), 1, CALL)[0]


@njit(nogil=True, cache=True)
def workspace(call):  # type: ignore
    """Of one thread."""
    num_rows = call.num_new * (call.num_heads // call.num_kv_heads) + _1  # queries go in pairs
    queries, sums = _zeros(num_rows * call.head_dim), _zeros(num_rows * call.head_dim)
    scores, largest, totals = _zeros(num_rows * _KEYS), _zeros(num_rows), _zeros(num_rows)
    return queries, scores, sums, largest, totals, _zeros(_4 * call.head_dim)


@njit(nogil=True, cache=True)
def attend_item(call, arrays, sequence, kv_head, work):  # type: ignore
    qkv, layer, out = arrays
    queries, scores, sums, largest, totals, rest = work
    dim, rows = call.head_dim, int64_at(call.rows)
    row = _3 * sequence
    first, num_new, num_keys = _U64(rows[row]), _U64(rows[row + _1]), _U64(rows[row + _2])
    keys_at = (_2 * call.num_kv_heads * sequence + kv_head) * call.capacity * dim
    values_at = keys_at + call.num_kv_heads * call.capacity * dim
    new_key, group = call.num_heads + kv_head, call.num_heads // call.num_kv_heads
    _store(call, qkv, new_key, first, num_new, sequence, layer, keys_at)
    _store(call, qkv, new_key + call.num_kv_heads, first, num_new, sequence, layer, values_at)
    num_rows = num_new * group
    for i in range(num_new):
        at = ((first + i) * (call.num_heads + _2 * call.num_kv_heads) + kv_head * group) * dim
        _load(qkv, at, group * dim, queries, i * group * dim)
    _scale(queries, _U64(0), num_rows * dim, _F32(call.scale))
    sums[:], totals[:], largest[:] = _F32(0), _F32(0), _LOWEST
    if call.sinks:
        sinks = float32_at(call.sinks)
        for row in range(num_rows):
            largest[row], totals[row] = sinks[kv_head * group + row % group], _F32(1)
    first_start, first_position = _U64(0), _U64(int64_at(call.positions)[sequence * call.num_new])
    if call.window and first_position >= call.window:
        first_start = (first_position - call.window + _1) // _KEYS * _KEYS
    for start in range(first_start, num_keys, _KEYS):
        count = min(_KEYS, num_keys - start)
        column = start % call.capacity  # of a ring: blocks of 64 lie whole in it
        _score(queries, num_rows, layer, keys_at + column * dim, count, dim, rest, scores)
        if call.softcap > 0.0:
            _cap(scores, num_rows, _F32(call.softcap))
        if call.window:
            _hide_far(call, scores, num_rows, group, count, sequence * call.num_new, start)
        _hide(call, scores, num_rows, group, count, sequence * call.num_new, start)
        _weigh(scores, num_rows, dim, sums, largest, totals)
        _add(scores, num_rows, layer, values_at + column * dim, count, dim, rest, sums)
    for row in range(num_rows):
        at = ((first + row // group) * call.num_heads + kv_head * group + row % group) * dim
        _unload(sums, row * dim, dim, _F32(1) / totals[row], out, at)


@njit(nogil=True, cache=True)
def _store(call, qkv, head, first, num_new, sequence, layer, at):  # type: ignore
    columns, dim, step = int64_at(call.columns), call.head_dim, call.num_heads + _2 * call.num_kv_heads
    for i in range(num_new):
        source = ((first + i) * step + head) * dim
        target = at + _U64(columns[sequence * call.num_new + i]) % call.capacity * dim
        for d in range(dim):
            layer[target + d] = narrow(widen(qkv[source + d]), layer[target + d])


@njit(nogil=True, cache=True)
def _score(queries, num_rows, keys, at, count, dim, rest, scores):  # type: ignore
    """query · key. Constant head sizes compile to faster loops."""
    if dim == _64:
        _score_all(queries, num_rows, keys, at, count, _64, rest, scores)
    elif dim == _128:
        _score_all(queries, num_rows, keys, at, count, _128, rest, scores)
    else:
        _score_all(queries, num_rows, keys, at, count, dim, rest, scores)


@njit(inline="always")
def _score_all(queries, num_rows, keys, at, count, dim, rest, scores):  # type: ignore
    whole = count // _4 * _4
    _load(keys, at + whole * dim, (count - whole) * dim, rest, _U64(0))
    for pair in range((num_rows + _1) // _2):
        q0, s0 = _2 * pair * dim, _2 * pair * _KEYS
        for j in range(_U64(0), whole, _4):
            _two_by_four(queries, q0, keys, at + j * dim, dim, scores, s0 + j)
        if whole < count:
            _two_by_four(queries, q0, rest, _U64(0), dim, scores, s0 + whole)


@njit(nogil=True, forceinline=True, fastmath=REORDERED)
def _two_by_four(queries, q0, keys, k0, dim, scores, s0):  # type: ignore
    a0, a1, a2, a3 = _F32(0), _F32(0), _F32(0), _F32(0)
    b0, b1, b2, b3 = _F32(0), _F32(0), _F32(0), _F32(0)
    q1, k1, k2, k3, s1 = q0 + dim, k0 + dim, k0 + _2 * dim, k0 + _3 * dim, s0 + _KEYS
    for d in range(dim):
        x, y = queries[q0 + d], queries[q1 + d]
        z0, z1 = widen(keys[k0 + d]), widen(keys[k1 + d])
        z2, z3 = widen(keys[k2 + d]), widen(keys[k3 + d])
        a0, a1, a2, a3 = a0 + x * z0, a1 + x * z1, a2 + x * z2, a3 + x * z3
        b0, b1, b2, b3 = b0 + y * z0, b1 + y * z1, b2 + y * z2, b3 + y * z3
    scores[s0], scores[s0 + _1], scores[s0 + _2], scores[s0 + _3] = a0, a1, a2, a3
    scores[s1], scores[s1 + _1], scores[s1 + _2], scores[s1 + _3] = b0, b1, b2, b3


@njit(nogil=True, cache=True)
def _hide(call, scores, num_rows, group, count, first_mask, start):  # type: ignore
    """Adds the mask; scores beyond the last key become -inf."""
    for row in range(num_rows):
        if call.mask_length:
            mask, at = float32_at(call.mask), (first_mask + row // group) * call.mask_length + start
            for j in range(count):
                scores[row * _KEYS + j] += mask[at + j]
        for j in range(count, _KEYS):
            scores[row * _KEYS + j] = _NOTHING


@njit(nogil=True, cache=True)
def _cap(scores, num_rows, softcap):  # type: ignore
    """softcap · tanh(score / softcap), as 1 - 2 / (exp(2x) + 1)."""
    for at in range(num_rows * _KEYS):
        doubled = min(max(_2F * scores[at] / softcap, -_SATURATED), _SATURATED)
        scores[at] = softcap * (_F32(1) - _2F / (exp_of(doubled) + _F32(1)))


@njit(nogil=True, cache=True)
def _hide_far(call, scores, num_rows, group, count, first_new, start):  # type: ignore
    positions = int64_at(call.positions)
    for row in range(num_rows):
        position = _U64(positions[first_new + row // group])
        if position >= start + call.window:
            for j in range(min(count, position - call.window + _1 - start)):
                scores[row * _KEYS + j] = _NOTHING


@njit(nogil=True, cache=True)
def _weigh(scores, num_rows, dim, sums, largest, totals):  # type: ignore
    """Replaces scores s by exp(s - largest so far), and rescales `sums` and `totals` likewise."""
    for row in range(num_rows):
        found = _largest(scores, row * _KEYS)
        if found > largest[row]:
            factor = _F32(math.exp(largest[row] - found))
            _scale(sums, row * dim, dim, factor)
            totals[row], largest[row] = totals[row] * factor, found
        totals[row] += _to_weights(scores, row * _KEYS, largest[row])
    for j in range(_KEYS):
        scores[num_rows * _KEYS + j] = _F32(0)


@njit(nogil=True, cache=True, fastmath=REORDERED)
def _largest(scores, at):  # type: ignore
    largest = _LOWEST
    for j in range(_KEYS):
        largest = max(largest, scores[at + j])
    return largest


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
def _add(weights, num_rows, values, at, count, dim, rest, sums):  # type: ignore
    if dim == _64:
        _add_all(weights, num_rows, values, at, count, _64, rest, sums)
    elif dim == _128:
        _add_all(weights, num_rows, values, at, count, _128, rest, sums)
    else:
        _add_all(weights, num_rows, values, at, count, dim, rest, sums)


@njit(inline="always")
def _add_all(weights, num_rows, values, at, count, dim, rest, sums):  # type: ignore
    whole = count // _4 * _4
    _load(values, at + whole * dim, (count - whole) * dim, rest, _U64(0))
    for pair in range((num_rows + _1) // _2):
        w0, s0 = _2 * pair * _KEYS, _2 * pair * dim
        for j in range(_U64(0), whole, _4):
            _add_four(weights, w0 + j, values, at + j * dim, dim, sums, s0)
        if whole < count:
            _add_four(weights, w0 + whole, rest, _U64(0), dim, sums, s0)


@njit(nogil=True, forceinline=True, fastmath=REORDERED)
def _add_four(weights, w0, values, v0, dim, sums, s0):  # type: ignore
    w1, v1, v2, v3, s1 = w0 + _KEYS, v0 + dim, v0 + _2 * dim, v0 + _3 * dim, s0 + dim
    a0, a1, a2, a3 = weights[w0], weights[w0 + _1], weights[w0 + _2], weights[w0 + _3]
    b0, b1, b2, b3 = weights[w1], weights[w1 + _1], weights[w1 + _2], weights[w1 + _3]
    for d in range(dim):
        x0, x1 = widen(values[v0 + d]), widen(values[v1 + d])
        x2, x3 = widen(values[v2 + d]), widen(values[v3 + d])
        sums[s0 + d] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
        sums[s1 + d] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3


@njit(nogil=True, cache=True)
def _scale(numbers, at, size, factor):  # type: ignore
    for i in range(size):
        numbers[at + i] *= factor


# ── numbers in memory ───────────────────────────────────────────────────────────────────────────────────────


@njit(inline="always")
def _zeros(size):  # type: ignore
    return np.zeros(size, np.float32)


@njit(nogil=True, cache=True)
def _load(source, at, size, target, to):  # type: ignore
    for i in range(size):
        target[to + i] = widen(source[at + i])


@njit(nogil=True, cache=True)
def _unload(source, at, size, factor, target, to):  # type: ignore
    for i in range(size):
        target[to + i] = narrow(source[at + i] * factor, target[to + i])


def widen(number: Any) -> Any:
    """From float32, or the bits of a bfloat16."""


def narrow(number: Any, like: Any) -> Any:
    """To float32, or the bits of the nearest bfloat16 (ties to even)."""


@overload(widen)
def _(number):  # type: ignore
    if isinstance(number, types.Float):
        return lambda number: number
    return lambda number: _U32(_U32(number) << _U32(16)).view(np.float32)


@overload(narrow)
def _(number, like):  # type: ignore
    if isinstance(like, types.Float):
        return lambda number, like: number
    return lambda number, like: round_to_bfloat16(number)


@njit(inline="always")
def round_to_bfloat16(number):  # type: ignore
    bits = _F32(number).view(np.uint32)
    return np.uint16(_U32(bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16))

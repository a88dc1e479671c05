"""The stages of layers.py, as compiled loops.

Items of a stage: equal shares of rows (norms) or of panels (products); of attention, see items.py. A thread
that finds none left waits until all are done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit, types  # type: ignore[attr-defined]  # carray is public and not listed
from numba.extending import overload

from tlt.base import loops
from tlt.base.loops import REORDERED, as_pointer, exp_of, float32_at, int64_at, uint16_at
from tlt.models.loops.blocks import BFLOAT16, FLOAT32, LANES
from tlt.models.loops.items import COUNT, ROW, call_at, store_item, workspace
from tlt.models.loops.products import multiply_float32

LAYER = (
    "input_gains",
    "num_norms",
    "qkv",
    "qkv_bias",
    "qk_gains",
    "attended",
    "mlp_gains",
    "gate_up",
    "down",
    "cache",
    "captured",
)
"""Columns of a layer's row: addresses, 0 where there is none. num_norms: vectors that attention's input is
made of; 0: it is read as it is. captured: where the layer's input goes."""
(
    _INPUT_GAINS,
    _NUM_NORMS,
    _QKV,
    _QKV_BIAS,
    _QK_GAINS,
    _ATTENDED,
    _MLP_GAINS,
    _GATE_UP,
    _DOWN,
    CACHE,
    CAPTURED,
) = range(len(LAYER))
_ADDRESSES = (
    "attention",
    "attend",
    "multiply",
    "run_layers",
    "layers",
    "counters",
    "x",
    "read",
    "normed",
    "qkv",
    "mixed",
    "gate_up",
    "cos",
    "sin",
    "final_gains",
    "features",
)
_SIZES = (
    "num_layers",
    "num_tokens",
    "hidden",
    "num_read",
    "intermediate",
    "captured_width",
    "parts",
)
CALL = np.dtype(
    [
        *loops.HEAD,
        *[(name, "i8") for name in (*_ADDRESSES, *_SIZES)],
        ("eps", "f8"),
    ]
)
"""attend, multiply, run_layers: `compiled_item`, `compiled_multiply`, `compiled_layers` of the weights'
type."""
_COLUMNS = len(LAYER)
_F32, _U64 = np.float32, np.uint64
_READ, _PROJECT, _ROTATE, _STORE, _ATTEND, _ADD, _NORM, _GATE, _DOWN_AND_ADD = range(9)
STAGES = 9
"""Of a layer; the final norm follows. _ROTATE and _STORE have items only where sequences need others' keys
(`num_stored`); else _ATTEND does all three."""
COUNTER_BYTES = 16
"""Of a stage."""


def compiled() -> int:
    return loops.compiled(_run)


def _run(at):  # type: ignore
    call = carray(as_pointer(at), 1, CALL)[0]
    work = workspace(call_at(call.attention))
    loops.call(call.run_layers, (at, call.counters, work.ctypes.data))
    work[_U64(0)] = _F32(0)  # it lives until here


def compiled_layers(dtype: torch.dtype) -> int:
    """The record: addresses of the call, of the stages' counters and of a workspace."""
    return loops.compiled(_layers_float32 if dtype == torch.float32 else _layers_bfloat16)


_LAYERS = np.dtype([(name, "i8") for name in ("call", "counters", "work")])


def _layers_float32(at):  # type: ignore
    _run_layers(carray(as_pointer(at), 1, _LAYERS)[0], FLOAT32)


def _layers_bfloat16(at):  # type: ignore
    _run_layers(carray(as_pointer(at), 1, _LAYERS)[0], BFLOAT16)


# ── stages ──────────────────────────────────────────────────────────────────────────────────────────────────


@njit(inline="always")
def _run_layers(given, like):  # type: ignore
    """like: an array of the weights' and caches' numbers."""
    call = carray(as_pointer(given.call), 1, CALL)[0]
    attend = call_at(call.attention)
    for stage in range(call.num_layers * STAGES + (1 if call.final_gains else 0)):
        num_items = _num_items(call, attend, stage % STAGES)
        counter = given.counters + COUNTER_BYTES * stage
        while True:
            item = take_of_stage(counter, num_items)
            if item < 0:
                break
            if stage == call.num_layers * STAGES:
                _norm_part(call, call.final_gains, call.features, item)
            else:
                _do(call, attend, stage, item, given.work, like)
            finish(counter)


@njit(nogil=True, cache=True)
def _num_items(call, attend, stage):  # type: ignore
    num_rows = attend.num_rows
    if stage == _STORE:
        num_rows = attend.num_stored
    elif stage == _ROTATE:
        num_rows = num_rows if attend.num_stored else _U64(0)
    elif stage != _ATTEND:
        return call.parts
    return np.int64(num_rows * attend.num_kv_heads)


@njit(nogil=True, cache=True)
def _do(call, attend, number, item, work, like):  # type: ignore
    index, stage = number // STAGES, number % STAGES
    layers, at = int64_at(call.layers), index * _COLUMNS
    read = call.read if index == 0 and call.read else call.x
    if stage == _READ:
        _read_part(call, layers, at, read, item)
    elif stage == _PROJECT:
        source = call.normed if layers[at + _NUM_NORMS] else read
        _qkv_part(call, attend, layers, at, source, item, like)
    elif stage in (_ROTATE, _STORE, _ATTEND):
        _attend_part(call, attend, layers, at, stage, item, work, like)
    elif stage == _ADD:
        num_attended = np.int64(attend.num_heads * attend.head_dim)
        _add_part(call, call.mixed, num_attended, num_attended, layers[at + _ATTENDED], item, like)
    elif stage == _NORM:
        _norm_part(call, layers[at + _MLP_GAINS], call.normed, item)
    elif stage == _GATE:
        _gate_part(call, layers[at + _GATE_UP], item, like)
    else:
        _add_part(
            call, call.gate_up, 2 * call.intermediate, call.intermediate, layers[at + _DOWN], item, like
        )


@njit(nogil=True, cache=True)
def take_of_stage(counter, num_items):  # type: ignore
    """The next item of a stage; -1: all are done. counter: the address of (items taken, items done)."""
    item = loops.add_to(counter, 1)
    if item < num_items:
        return item
    loops.wait_for(counter + 8, num_items)
    return np.int64(-1)


@njit(inline="always")
def finish(counter):  # type: ignore
    loops.add_to(counter + 8, 1)


@njit(inline="always")
def share(call, part, size):  # type: ignore
    return size * part // call.parts, size * (part + 1) // call.parts


@njit(nogil=True, cache=True)
def _read_part(call, layers, at, read, part):  # type: ignore
    num_norms, gains, hidden = layers[at + _NUM_NORMS], layers[at + _INPUT_GAINS], call.hidden
    start, end = share(call, part, call.num_tokens)
    for row in range(start, end):
        if layers[at + CAPTURED]:
            x, kept = float32_at(call.x), float32_at(layers[at + CAPTURED])
            for i in range(hidden):
                kept[_U64(row * call.captured_width + i)] = x[_U64(row * hidden + i)]
        for norm in range(num_norms):
            vector = row * num_norms + norm
            norm_row(call, read, vector, hidden, gains + 4 * norm * hidden, call.normed, vector * hidden)


@njit(nogil=True, cache=True)
def _norm_part(call, gains, target, part):  # type: ignore
    first, end = share(call, part, call.num_tokens)
    for row in range(first, end):
        norm_row(call, call.x, row, call.hidden, gains, target, row * call.hidden)


@njit(nogil=True, cache=True, fastmath=REORDERED, error_model="numpy")
def norm_row(call, source, row, size, gains, target, to):  # type: ignore
    """x / sqrt(mean(x²) + eps) · gain."""
    source, gains, target, at = float32_at(source), float32_at(gains), float32_at(target), _U64(row * size)
    total = _F32(0)
    for i in range(_U64(size)):
        total += source[at + i] * source[at + i]
    factor = _F32(1) / np.sqrt(total / _F32(size) + _F32(call.eps))
    for i in range(_U64(size)):
        target[_U64(to) + i] = source[at + i] * factor * gains[i]


@njit(inline="always")
def _qkv_part(call, attend, layers, at, source, part, like):  # type: ignore
    size = np.int64((attend.num_heads + _U64(2) * attend.num_kv_heads) * attend.head_dim)
    first, end = share(call, part, size // LANES)
    x, matrix = (source, call.num_read), (layers[at + _QKV], call.multiply, like)
    multiply_float32(x, call.num_tokens, call.num_read, matrix, first, end, (call.qkv, size), 0)
    if layers[at + _QKV_BIAS]:
        qkv, bias = float32_at(call.qkv), float32_at(layers[at + _QKV_BIAS])
        for row in range(call.num_tokens):
            for i in range(first * LANES, end * LANES):
                qkv[_U64(row * size + i)] += bias[_U64(i)]


@njit(inline="always")
def _attend_part(call, attend, layers, at, stage, item, work, like):  # type: ignore
    gains, cache, qkv = layers[at + _QK_GAINS], layers[at + CACHE], float32_at(call.qkv)
    row, kv_head = _U64(item) // attend.num_kv_heads, _U64(item) % attend.num_kv_heads
    if stage == _ROTATE or (stage == _ATTEND and not attend.num_stored):
        rows, group = int64_at(attend.rows), attend.num_heads // attend.num_kv_heads
        first, num_new = _U64(rows[row * ROW]), _U64(rows[row * ROW + COUNT])
        for token in range(first, first + num_new):
            for head in range(kv_head * group, (kv_head + _U64(1)) * group):
                _rotate(call, attend, qkv, gains, token, head)
            _rotate(call, attend, qkv, gains, token, attend.num_heads + kv_head)
    if stage == _STORE or (stage == _ATTEND and not attend.num_stored):
        store_item(attend, (qkv, array_at(cache, like), qkv), row, kv_head)
    if stage == _ATTEND:
        loops.call(call.attend, (call.attention, call.qkv, cache, call.mixed, work, row, kv_head))


@njit(nogil=True, cache=True)
def _rotate(call, attend, qkv, gains, token, head):  # type: ignore
    dim, half = attend.head_dim, attend.head_dim // _U64(2)
    vector = token * (attend.num_heads + _U64(2) * attend.num_kv_heads) + head
    if gains:
        at = gains + np.int64(_U64(4) * head * dim)
        norm_row(call, call.qkv, vector, dim, at, call.qkv, vector * dim)
    cos, sin = float32_at(call.cos), float32_at(call.sin)
    at, of = vector * dim, token * dim
    for i in range(half):
        a, b = qkv[at + i], qkv[at + half + i]
        qkv[at + i] = a * cos[of + i] + b * sin[of + i]
        qkv[at + half + i] = b * cos[of + half + i] + a * sin[of + half + i]


@njit(inline="always")
def _add_part(call, x, stride, num_in, weights, part, like):  # type: ignore
    """stride: numbers of x from row to row."""
    first, end = share(call, part, call.hidden // LANES)
    matrix, out = (weights, call.multiply, like), (call.x, call.hidden)
    multiply_float32((x, stride), call.num_tokens, num_in, matrix, first, end, out, 1)


@njit(inline="always")
def _gate_part(call, weights, part, like):  # type: ignore
    """silu(gate) · up, in place of gate."""
    size, num_panels = call.intermediate, call.intermediate // LANES
    first, end = share(call, part, num_panels)
    x, matrix, out = (call.normed, call.hidden), (weights, call.multiply, like), (call.gate_up, 2 * size)
    multiply_float32(x, call.num_tokens, call.hidden, matrix, first, end, out, 0)
    multiply_float32(x, call.num_tokens, call.hidden, matrix, num_panels + first, num_panels + end, out, 0)
    for row in range(call.num_tokens):
        _gate(call.gate_up, row * 2 * size + first * LANES, (end - first) * LANES, size)


@njit(nogil=True, cache=True, fastmath=REORDERED, error_model="numpy")
def _gate(numbers, at, count, size):  # type: ignore
    numbers, at, up = float32_at(numbers), _U64(at), _U64(size)
    for i in range(at, at + _U64(count)):
        gate = numbers[i]
        power = exp_of(-abs(gate))
        sigmoid = (_F32(1) if gate >= _F32(0) else power) / (_F32(1) + power)
        numbers[i] = gate * sigmoid * numbers[i + up]


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────


def array_at(address: Any, like: Any) -> Any:
    """The array at an address, of numbers like these."""


@overload(array_at)
def _(address, like):  # type: ignore
    if isinstance(like.dtype, types.Float):
        return lambda address, like: float32_at(address)
    return lambda address, like: uint16_at(address)

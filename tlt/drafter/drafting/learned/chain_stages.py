"""The stages of compiled_chain.py, as compiled loops.

    a level   read ─▶ fc ─▶ stream ─▶ [ the layer: loops/stages.py ] ─▶ output ─▶ head ─▶ choose

Level 0 reads the pairs that every sequence misses, the others the token chosen last. In bfloat16, numbers are
rounded where `eagle.py`, `drafter.py` and `pair_cache.py`, the reference, have tensors.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit  # type: ignore[attr-defined]  # carray is public and not listed

from tlt.base import loops
from tlt.base.loops import as_pointer, float32_at, int64_at
from tlt.models.loops.blocks import BFLOAT16, FLOAT32, LANES
from tlt.models.loops.items import ROW, SEEN, call_at, workspace
from tlt.models.loops.numbers import narrow, widen
from tlt.models.loops.products import multiply_float32
from tlt.models.loops.stages import (
    CALL,
    COUNTER_BYTES,
    STAGES,
    array_at,
    finish,
    norm_row,
    share,
    take_of_stage,
)
from tlt.speculation.law.compiled import CHUNK, near_noise

SEQUENCE = ("offset", "count", "start", "position", "rope")
"""Of a sequence: where its `count` missing pairs begin among all; the first's cache column, position and
rotary row."""
_OFFSET, _COUNT, _START, _POSITION, _ROPE = range(len(SEQUENCE))

_ADDRESSES = (
    "calls",
    "counters",
    "sequences",
    "new_tokens",
    "tokens",
    "ring",
    "embedding",
    "cos_rows",
    "sin_rows",
    "pair",
    "fc",
    "fc_bias",
    "fc_in",
    "fc_out",
    "stream_gains",
    "hidden",
    "norm_gains",
    "outputs",
    "head",
    "logits",
    "later_logits",
    "columns",
    "rows",
    "keys",
    "positions",
    "token_ids",
    "inverse_temperatures",
    "noise_scales",
)
_SIZES = (
    "num_rows",
    "depth",
    "num_columns",
    "ring_columns",
    "captured",
    "head_dim",
    "num_rotary",
    "fc_size",
    "fc_in_width",
    "fc_out_width",
    "fc_levels",
    "num_draft",
)
DRAFT = np.dtype([*loops.HEAD, *((name, "i8") for name in (*_ADDRESSES, *_SIZES)), ("sharpness", "f8")])
"""calls: the layer's records, of missing pairs and of a level's tokens; columns and rows are the second's.
num_columns: see `FeatureHistory`, whose ring has `ring_columns` by now. fc_levels: so many levels read fc.
sharpness: 1 / tau. Zero stands for no bias, gains, token ids, temperatures or scales."""

_READ, _FC, _STREAM, _OUTPUT, _HEAD, _CHOOSE = range(6)
NUM_COUNTED = 6 + STAGES + 1
"""Stages of a level; the layer's are counted first."""
_CALL_BYTES = CALL.itemsize
_F32, _U32, _U64 = np.float32, np.uint32, np.uint64


def compiled(dtype: torch.dtype) -> int:
    return loops.compiled(_draft_float32 if dtype == torch.float32 else _draft_bfloat16)


def _draft_float32(at):  # type: ignore
    _draft(carray(as_pointer(at), 1, DRAFT)[0], FLOAT32)


def _draft_bfloat16(at):  # type: ignore
    _draft(carray(as_pointer(at), 1, DRAFT)[0], BFLOAT16)


@njit(inline="always")
def _draft(draft, like):  # type: ignore
    calls = carray(as_pointer(draft.calls), 1, CALL)
    layer_work = workspace(call_at(calls[_U64(0)].attention))
    work = np.empty(CHUNK, np.uint32), np.empty(CHUNK, np.float32)
    for level in range(draft.depth):
        call = calls[_U64(1 if level else 0)]
        counters = draft.counters + COUNTER_BYTES * NUM_COUNTED * level
        for stage in (_READ, _FC, _STREAM):
            _run_stage(draft, call, level, stage, counters, work, like)
        at = draft.calls + (_CALL_BYTES if level else 0)
        loops.call(call.run_layers, (at, counters, layer_work.ctypes.data))
        for stage in (_OUTPUT, _HEAD, _CHOOSE):
            _run_stage(draft, call, level, stage, counters, work, like)
    layer_work[_U64(0)] = _F32(0)  # it lives until here


@njit(nogil=True, cache=True)
def _run_stage(draft, call, level, stage, counters, work, like):  # type: ignore
    counter = counters + COUNTER_BYTES * (STAGES + 1 + stage)
    num_items = draft.num_rows if stage in (_READ, _CHOOSE) else call.parts
    while True:
        item = take_of_stage(counter, num_items)
        if item < 0:
            break
        if stage == _READ:
            _read(draft, call, level, item, like)
        elif stage == _FC:
            if level < draft.fc_levels:
                _join(draft, call, item, like)
        elif stage == _STREAM:
            _start_stream(draft, call, level, item, like)
        elif stage == _OUTPUT:
            _output(draft, call, level, item, like)
        elif stage == _HEAD:
            first, end = share(call, item, _width(draft) // LANES)
            x, out = (draft.outputs, call.hidden), (_logits(draft, level), _width(draft))
            multiply_float32(
                x, draft.num_rows, call.hidden, (draft.head, call.multiply, like), first, end, out, 0
            )
        else:
            _choose(draft, level, item, work, like)
        finish(counter)


@njit(inline="always")
def _width(draft):  # type: ignore
    return (draft.num_draft + LANES - 1) // LANES * LANES


@njit(inline="always")
def _logits(draft, level):  # type: ignore
    return draft.later_logits if level else draft.logits


@njit(inline="always")
def _float64_at(address):  # type: ignore
    return carray(as_pointer(address), 1, np.float64)


@njit(inline="always")
def _rounded(number, like):  # type: ignore
    return widen(narrow(number, like[_U64(0)]))


# ── stages ──────────────────────────────────────────────────────────────────────────────────────────────────


@njit(inline="always")
def _of(draft, row, number):  # type: ignore
    return int64_at(draft.sequences)[_U64(row * len(SEQUENCE) + number)]


@njit(nogil=True, cache=True)
def _read(draft, call, level, row, like):  # type: ignore
    size, tokens = call.hidden, int64_at(draft.tokens)
    rope, at = _of(draft, row, _ROPE), row * (draft.depth + 1) + level
    if level == 0:
        offset, count = _of(draft, row, _OFFSET), _of(draft, row, _COUNT)
        new_tokens = int64_at(draft.new_tokens)
        for i in range(count):
            _embed(draft, call, offset + i, new_tokens[_U64(offset + i)], rope + i, like)
            column = (_of(draft, row, _POSITION) + i) % draft.num_columns
            _read_features(draft, size, offset + i, row * draft.ring_columns + column, like)
        tokens[_U64(at)] = new_tokens[_U64(offset + count - 1)]
    else:
        drafted = _of(draft, row, _COUNT) + level - 1
        column = _of(draft, row, _START) + drafted
        int64_at(draft.columns)[_U64(row)] = column
        int64_at(draft.rows)[_U64(row) * ROW + SEEN] = column + 1
        _embed(draft, call, row, tokens[_U64(at)], rope + drafted, like)
        pair, hidden = float32_at(draft.pair), float32_at(draft.hidden)
        for i in range(size):
            pair[_U64((2 * row + 1) * size + i)] = hidden[_U64(row * size + i)]


@njit(inline="always")
def _embed(draft, call, pair, token, rope, like):  # type: ignore
    size, dim, rope = call.hidden, draft.head_dim, min(rope, draft.num_rotary - 1)
    _widen(array_at(draft.embedding, like), token * size, size, draft.pair, 2 * pair * size)
    _widen(array_at(draft.cos_rows, like), rope * dim, dim, call.cos, pair * dim)
    _widen(array_at(draft.sin_rows, like), rope * dim, dim, call.sin, pair * dim)


@njit(inline="always")
def _read_features(draft, size, pair, place, like):  # type: ignore
    """EAGLE's fc reads the pair, EAGLE-3's the features alone."""
    num, to = draft.fc_size, pair * draft.fc_in_width
    if draft.fc_in == draft.pair:
        num, to = size, to + size
    _widen(array_at(draft.ring, like), place * draft.captured, num, draft.fc_in, to)


@njit(nogil=True, cache=True)
def _widen(source, at, size, target, to):  # type: ignore
    target, at, to = float32_at(target), _U64(at), _U64(to)
    for i in range(_U64(size)):
        target[to + i] = widen(source[at + i])


@njit(nogil=True, cache=True)
def _join(draft, call, part, like):  # type: ignore
    first, end = share(call, part, call.hidden // LANES)
    x, width = (draft.fc_in, draft.fc_in_width), draft.fc_out_width
    multiply_float32(
        x,
        call.num_tokens,
        draft.fc_size,
        (draft.fc, call.multiply, like),
        first,
        end,
        (draft.fc_out, width),
        0,
    )
    if draft.fc_bias:
        out, bias = float32_at(draft.fc_out), float32_at(draft.fc_bias)
        for row in range(call.num_tokens):
            for i in range(first * LANES, end * LANES):
                out[_U64(row * width + i)] += bias[_U64(i)]


@njit(nogil=True, cache=True)
def _start_stream(draft, call, level, part, like):  # type: ignore
    """EAGLE's residual stream is what fc returns, EAGLE-3's the pair's hidden state, or its norm."""
    size, out, x, pair = call.hidden, float32_at(draft.fc_out), float32_at(call.x), float32_at(draft.pair)
    first, end = share(call, part, call.num_tokens)
    for row in range(first, end):
        if level < draft.fc_levels:
            for i in range(size):
                at = _U64(row * draft.fc_out_width + i)
                out[at] = _rounded(out[at], like)
        if draft.fc_out == call.x:
            continue
        if draft.stream_gains:
            norm_row(call, draft.pair, 2 * row + 1, size, draft.stream_gains, call.x, row * size)
        for i in range(size):
            at = _U64(row * size + i)
            x[at] = _rounded(x[at], like) if draft.stream_gains else pair[_U64((2 * row + 1) * size + i)]


@njit(nogil=True, cache=True)
def _output(draft, call, level, part, like):  # type: ignore
    size, x, hidden, outputs = (
        call.hidden,
        float32_at(call.x),
        float32_at(draft.hidden),
        float32_at(draft.outputs),
    )
    first, end = share(call, part, draft.num_rows)
    for row in range(first, end):
        source = row if level else _of(draft, row, _OFFSET) + _of(draft, row, _COUNT) - 1
        for i in range(size):
            hidden[_U64(row * size + i)] = _rounded(x[_U64(source * size + i)], like)
        if draft.norm_gains:
            norm_row(call, draft.hidden, row, size, draft.norm_gains, draft.outputs, row * size)
            for i in range(size):
                outputs[_U64(row * size + i)] = _rounded(outputs[_U64(row * size + i)], like)


@njit(nogil=True, cache=True)
def _choose(draft, level, row, work, like):  # type: ignore
    words, scores = work
    keys, at = int64_at(draft.keys), 4 * row
    key = _U32(keys[_U64(at)]), _U32(keys[_U64(at + 1)]), _U32(keys[_U64(at + 2)]), _U32(keys[_U64(at + 3)])
    position = _U32(int64_at(draft.positions)[_U64(row)] + level)
    token_ids = carray(as_pointer(draft.token_ids), draft.num_draft if draft.token_ids else 0, np.int64)
    logits = carray(as_pointer(_logits(draft, level) + 4 * row * _width(draft)), draft.num_draft, np.float32)
    inverse = (
        _F32(_float64_at(draft.inverse_temperatures)[_U64(row)]) if draft.inverse_temperatures else _F32(1)
    )
    is_sampled = _float64_at(draft.noise_scales)[_U64(row)] != 0.0 if draft.noise_scales else True
    best, token = _F32(-np.inf), 0
    for start in range(0, draft.num_draft, CHUNK):
        part = logits[start : start + CHUNK]
        noise = scores[: part.shape[0]]
        for i in range(part.shape[0]):
            part[i] = _rounded(part[i], like)
        if is_sampled:
            near_noise(start, token_ids, key, position, words, noise)
        else:
            noise[:] = _F32(0)
        _add_scaled(noise, part, inverse, _F32(draft.sharpness))
        for i in range(part.shape[0]):
            if noise[i] > best:
                best, token = noise[i], start + i
    into = int64_at(draft.tokens)
    into[_U64(row * (draft.depth + 1) + level + 1)] = token_ids[token] if token_ids.shape[0] else token


@njit(nogil=True, cache=True, fastmath={"contract"})
def _add_scaled(noise, logits, inverse, factor):  # type: ignore
    """Rounds once, as torch.add does."""
    for i in range(noise.shape[0]):
        noise[i] += logits[i] * inverse * factor

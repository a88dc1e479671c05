"""Makes panels (products.py) within a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from tlt.models.loops.blocks import LANES
from tlt.models.loops.numbers import widen

_U64 = np.uint64
_LANES = _U64(LANES)
"""Indices are unsigned: Numba checks signed ones for negative values, which prevents vectorization."""

_I64, _LANES_F32 = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
_LANES_I32, _LANES_I16 = (ir.VectorType(ir.IntType(bits), LANES) for bits in (32, 16))


@njit(nogil=True, cache=True)
def turn_into_panels(source, at, num_out, num_in, panels):  # type: ignore
    """A matrix [O, I], float32 or the bits of bfloat16, becomes float32 panels [ceil(O / 16), I, 16]. Lanes
    beyond O are undefined."""
    whole = num_out // _LANES * _LANES if num_in % _LANES == _U64(0) else _U64(0)
    for o in range(_U64(0), whole, _LANES):
        for i in range(_U64(0), num_in, _LANES):
            _turn(source, at + o * num_in + i, num_in, panels, (o * num_in) + i * _LANES)
    for o in range(whole, num_out):
        to = o // _LANES * _LANES * num_in + o % _LANES
        for i in range(num_in):
            panels[to + i * _LANES] = widen(source[at + o * num_in + i])


@njit(nogil=True, cache=True)
def fill_panels(source, at, num_in, num_out, panels):  # type: ignore
    """The same for a matrix [I, O]."""
    whole = num_out // _LANES * _LANES
    for o in range(_U64(0), whole, _LANES):
        for i in range(num_in):
            _copy(source, at + i * num_out + o, panels, o * num_in + i * _LANES)
    for i in range(num_in):
        for o in range(whole, num_out):
            panels[whole * num_in + i * _LANES + o - whole] = widen(source[at + i * num_out + o])


def _load_lanes(context: Any, builder: Any, kind: Any, array: Any, place: Any) -> Any:
    pointer = builder.gep(context.make_array(kind)(context, builder, array).data, [place])
    if isinstance(kind.dtype, types.Float):
        return builder.load(builder.bitcast(pointer, _LANES_F32.as_pointer()), align=4)
    halves = builder.load(builder.bitcast(pointer, _LANES_I16.as_pointer()), align=2)
    bits = builder.shl(builder.zext(halves, _LANES_I32), ir.Constant(_LANES_I32, [16] * LANES))
    return builder.bitcast(bits, _LANES_F32)


def _store_lanes(context: Any, builder: Any, kind: Any, array: Any, place: Any, lanes: Any) -> None:
    pointer = builder.gep(context.make_array(kind)(context, builder, array).data, [place])
    builder.store(lanes, builder.bitcast(pointer, _LANES_F32.as_pointer()), align=4)


def _type_copy(typing_context, source, at, panels, to):  # type: ignore
    def generate(context, builder, signature, values):  # type: ignore
        lanes = _load_lanes(context, builder, signature.args[0], values[0], values[1])
        _store_lanes(context, builder, signature.args[2], values[2], values[3], lanes)
        return context.get_dummy_value()

    return types.void(source, types.uint64, panels, types.uint64), generate


def _type_turn(typing_context, source, at, stride, panels, to):  # type: ignore
    """Turns 16 rows into columns: in each of four steps, pairs of rows exchange halves of their groups."""

    def generate(context, builder, signature, values):  # type: ignore
        array, at, stride, panels, to = values
        steps = range(LANES)
        places = [builder.add(at, builder.mul(stride, ir.Constant(_I64, row))) for row in steps]
        rows = [_load_lanes(context, builder, signature.args[0], array, place) for place in places]
        for bit in (1, 2, 4, 8):
            first = [lane + LANES - bit if lane & bit else lane for lane in steps]
            second = [lane + LANES if lane & bit else lane + bit for lane in steps]
            masks = [ir.Constant(_LANES_I32, lanes) for lanes in (first, second)]
            for row in (row for row in steps if not row & bit):
                pair = rows[row], rows[row + bit]
                rows[row], rows[row + bit] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        for row, lanes in enumerate(rows):
            place = builder.add(to, ir.Constant(_I64, row * LANES))
            _store_lanes(context, builder, signature.args[3], panels, place, lanes)
        return context.get_dummy_value()

    return types.void(source, types.uint64, types.uint64, panels, types.uint64), generate


_copy: Any = intrinsic(_type_copy)
_turn: Any = intrinsic(_type_turn)

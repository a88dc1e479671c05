"""Products in bfloat16 by AMX: one instruction multiplies a tile of rows by a tile of weights.

    x [rows, 16 pairs] · weights [16 pairs, 16 outputs] ─▶ sums [rows, 16 outputs]     of at most 16 rows

A row's sums do not depend on the other rows of its tile. Their order is the processor's: of the 16 pairs, the
first numbers and the second numbers apart.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tlt.base.loops import FEATURES

SIDE = 16
"""Rows of a tile, its pairs of inputs, and its outputs (the lanes of a panel)."""

_LINE = 64
"""Bytes of a tile's line: 16 pairs of bfloat16, or 16 sums in float32."""

_AHEAD = 8
"""So many tiles of weights ahead, memory is asked for them: the processor itself looks less far."""

_ARCH_PRCTL, _REQUEST, _TILES = 158, 0x1023, 18
"""Linux's call, and what is asked for: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILE_DATA, asm/prctl.h."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_SUMS = ir.VectorType(ir.FloatType(), SIDE)


@cache
def are_there() -> bool:
    if not {"+amx-tile", "+amx-bf16"} <= FEATURES:
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILES) == 0)


@njit(inline="always")
def multiply(call, panels_at_once):  # type: ignore
    """A call of `blocks.multiply_panels` by bfloat16 weights, whose num_steps is a multiple of 16.

    Four sums are under way: two tiles of rows by two panels, or one tile by four.
    """
    for start in range(call.first, call.end, panels_at_once):
        stop = min(start + panels_at_once, call.end)
        for row in range(0, call.num_rows, 2 * SIDE):
            rows = min(call.num_rows - row, 2 * SIDE)
            _configure(min(rows, SIDE), max(rows - SIDE, 0))
            tiles = 2 if rows > SIDE else 1
            panel = start
            while panel < stop:
                panels = 4 // tiles if panel + 4 // tiles <= stop else 1
                numbers = (
                    call.x + row * call.x_stride * 4,
                    call.x_stride * 4,
                    call.weights + panel * call.num_steps * _LINE,
                    call.num_steps,
                    call.out + row * call.stride * 4 + panel * _LINE,
                    call.stride * 4,
                    call.adds,
                    rows,
                )
                _multiply_block(8 * tiles + panels, numbers)
                panel += panels
    _release()


# ── what Numba cannot say: LLVM's intrinsics ────────────────────────────────────────────────────────────────


def _do(builder: Any, name: str, *operands: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, kind, f"llvm.x86.{name}"
    )
    builder.call(function, operands)


def _constant(number: int) -> Any:
    return ir.Constant(_I64, number)


def _type_configure(typing_context, first, second):  # type: ignore
    """first, second: rows of the two tiles of rows; second is 0 where there is one.

    Registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights.
    """

    def generate(context, builder, signature, values):  # type: ignore
        first, second = (builder.trunc(value, _I8) for value in values)
        second = builder.select(builder.icmp_unsigned("==", second, ir.Constant(_I8, 0)), first, second)
        at = cgutils.alloca_once(builder, ir.ArrayType(_I8, _LINE))  # type: ignore[no-untyped-call]
        palette = ir.Constant(ir.ArrayType(_I8, _LINE), [1] + [0] * (_LINE - 1))
        builder.store(palette, at)
        start = builder.ptrtoint(at, _I64)

        def put(offset: int, value: Any) -> None:
            builder.store(
                value, builder.inttoptr(builder.add(start, _constant(offset)), value.type.as_pointer())
            )

        of_weights = ir.Constant(_I8, SIDE)
        for index, rows in enumerate((first, first, second, second, first, second, of_weights, of_weights)):
            put(16 + 2 * index, ir.Constant(_I16, _LINE))
            put(48 + index, rows)
        _do(builder, "ldtilecfg", builder.bitcast(at, _I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _type_release(typing_context):  # type: ignore
    def generate(context, builder, signature, values):  # type: ignore
        _do(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


_NUMBERS = types.UniTuple(types.int64, 8)  # type: ignore[no-untyped-call]


def _type_block(typing_context, kind, numbers):  # type: ignore
    """As `blocks._block`, of tiles of rows; strides are in bytes, and the number of rows comes last."""

    def generate(context, builder, signature, values):  # type: ignore
        kind, numbers = values
        rest = [builder.extract_value(numbers, index) for index in range(_NUMBERS.count)]
        end = builder.append_basic_block("end")
        choice = builder.switch(kind, end)
        for num_tiles, num_panels in ((1, 1), (1, 4), (2, 1), (2, 2)):
            start = builder.append_basic_block(f"tiles{num_tiles}x{num_panels}")
            choice.add_case(_constant(8 * num_tiles + num_panels), start)
            builder.position_at_end(start)
            _generate_block(builder, num_tiles, num_panels, rest)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(types.int64, _NUMBERS), generate


def _generate_block(builder: Any, num_tiles: int, num_panels: int, values: list[Any]) -> None:
    x, x_stride, weights, num_steps, out, stride, adds, num_rows = values
    tiles, panels = range(num_tiles), range(num_panels)
    sums = {(tile, panel): ir.Constant(_I8, 2 * tile + panel) for tile in tiles for panel in panels}

    def at(address: Any, *offsets: Any) -> Any:
        for offset in offsets:
            address = builder.add(address, offset)
        return builder.inttoptr(address, _I8.as_pointer())

    for register in sums.values():
        _do(builder, "tilezero", register)
    panel_bytes = builder.mul(num_steps, _constant(_LINE))
    with cgutils.for_range_slice(builder, _constant(0), num_steps, _constant(SIDE), inc=True) as (step, _):
        for tile in tiles:
            skip = builder.mul(x_stride, _constant(SIDE * tile)), builder.mul(step, _constant(4))
            _do(builder, "tileloadd64", ir.Constant(_I8, 4 + tile), at(x, *skip), x_stride)
        for panel in panels:
            skip = builder.mul(panel_bytes, _constant(panel)), builder.mul(step, _constant(_LINE))
            register = ir.Constant(_I8, 6 + panel % 2)
            _do(builder, "tileloadd64", register, at(weights, *skip), _constant(_LINE))
            for line in range(SIDE):
                _fetch(builder, at(weights, *skip, _constant(_LINE * (SIDE * _AHEAD + line))))
            for tile in tiles:
                _do(builder, "tdpbf16ps", sums[tile, panel], ir.Constant(_I8, 4 + tile), register)
    room = cgutils.alloca_once(builder, ir.ArrayType(_SUMS, SIDE))  # type: ignore[no-untyped-call]
    with builder.if_else(builder.icmp_signed("!=", adds, _constant(0))) as (add, plain):
        for case in (add, plain):
            with case:
                for (tile, panel), register in sums.items():
                    skip = builder.mul(stride, _constant(SIDE * tile))
                    into = at(out, skip, _constant(_LINE * panel))
                    if case is plain:
                        _do(builder, "tilestored64", register, into, stride)
                        continue
                    _do(
                        builder,
                        "tilestored64",
                        register,
                        builder.bitcast(room, _I8.as_pointer()),
                        _constant(_LINE),
                    )
                    rest = builder.sub(num_rows, _constant(SIDE * tile))
                    whole = builder.icmp_signed(">", rest, _constant(SIDE))
                    _add_rows(builder, room, into, stride, builder.select(whole, _constant(SIDE), rest))


def _fetch(builder: Any, address: Any) -> None:
    """An address may lie beyond all weights."""
    kind = ir.FunctionType(ir.VoidType(), [address.type, *[_I32] * 3])
    prefetch = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, kind, "llvm.prefetch.p0"
    )
    for_reading, second_cache, data = (ir.Constant(_I32, number) for number in (0, 2, 1))
    builder.call(prefetch, [address, for_reading, second_cache, data])


def _add_rows(builder: Any, room: Any, into: Any, stride: Any, num_rows: Any) -> None:
    start = builder.ptrtoint(into, _I64)
    with cgutils.for_range(builder, num_rows) as loop:
        place = builder.add(start, builder.mul(stride, loop.index))
        row = builder.inttoptr(place, _SUMS.as_pointer())
        total = builder.load(builder.gep(room, [_constant(0), loop.index]))
        builder.store(builder.fadd(builder.load(row, align=4), total), row, align=4)


_configure: Any = intrinsic(_type_configure)
_release: Any = intrinsic(_type_release)
_multiply_block: Any = intrinsic(_type_block)

"""A block of rows by panels, whose sums stay in registers: see products.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]  # carray is public and not listed
from numba.core import cgutils
from numba.extending import intrinsic, overload

from tlt.base import loops
from tlt.base.loops import FEATURES, as_pointer
from tlt.models.loops import tiles

LANES = 16
"""Outputs of a panel."""

PANELS_AT_ONCE = 16
"""Their weights are read again for every block of rows, from a cache."""

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_LANES_F32, _LANES_I32 = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


llvm.initialize_native_asmparser()  # for _add_pair
MOST_SUMS = 24 if "+avx512f" in FEATURES else 6
"""Vectors of 16 that fit into the processor's registers beside weights and inputs."""

_HAS_BFLOAT16 = "+avx512bf16" in FEATURES

MOST_ROWS = MOST_SUMS // 2 if MOST_SUMS > 6 else MOST_SUMS
"""A block has at most so many."""


@njit(inline="always")
def panels_of_block(rows):  # type: ignore
    """Few rows take more panels at once: a sum waits for its last product, so several must be under way."""
    return 4 if 4 * rows <= min(MOST_SUMS, 8) else 2 if 2 * rows <= MOST_SUMS else 1


_NAMES = ("x", "x_stride", "num_rows", "num_steps", "weights", "first", "end", "out", "stride", "adds")
_CALL = np.dtype([(name, "i8") for name in _NAMES])


@njit(inline="always")
def multiply_panels(x, num_rows, num_steps, weights, first, end, out, adds):  # type: ignore
    """x: (address, words from row to row). out: the same, of float32. A word is a float32, or two bfloat16.
    weights: (address, `compiled_multiply` of their type).
    adds: whether to add to out.
    """
    call = x[0], x[1], num_rows, num_steps, weights[0], first, end, out[0], out[1], adds
    loops.call(weights[1], call)


def compiled_multiply(dtype: torch.dtype) -> int:
    """dtype: float32 or bfloat16. The loop's record: `_CALL` (`multiply_panels`)."""
    if dtype == torch.float32:
        return loops.compiled(_multiply_float32)
    return loops.compiled(_multiply_in_tiles if tiles.are_there() else _multiply_bfloat16)


def bfloat16_by() -> str:
    """What multiplies bfloat16 here (`equal_rows.multiplied_by`)."""
    return "AMX" if tiles.are_there() else "AVX512_BF16" if _HAS_BFLOAT16 else "float32"


def _multiply_float32(at):  # type: ignore
    _multiply(carray(as_pointer(at), 1, _CALL)[0], FLOAT32)


def _multiply_bfloat16(at):  # type: ignore
    _multiply(carray(as_pointer(at), 1, _CALL)[0], BFLOAT16)


def _multiply_in_tiles(at):  # type: ignore
    call = carray(as_pointer(at), 1, _CALL)[0]
    if call.num_steps % tiles.SIDE:
        _multiply(call, BFLOAT16)
    else:
        tiles.multiply(call, PANELS_AT_ONCE)


@njit(inline="always")
def _multiply(call, like):  # type: ignore
    num_rows, num_steps, x_stride, stride = call.num_rows, call.num_steps, call.x_stride, call.stride
    num_blocks = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    for start in range(call.first, call.end, PANELS_AT_ONCE):
        stop = min(start + PANELS_AT_ONCE, call.end)
        for block in range(num_blocks):
            row = num_rows * block // num_blocks
            rows = num_rows * (block + 1) // num_blocks - row
            panel = start
            while panel < stop:
                panels = panels_of_block(rows)
                if panel + panels > stop:
                    panels = 1
                into = call.out + (row * stride + panel * LANES) * 4
                from_weights = call.weights + panel * num_steps * LANES * 4
                numbers = (
                    call.x + row * x_stride * 4,
                    x_stride,
                    from_weights,
                    num_steps,
                    into,
                    stride,
                    call.adds,
                )
                _multiply_block(8 * rows + panels, numbers, like)
                panel += panels


FLOAT32, BFLOAT16 = np.zeros(1, np.float32), np.zeros(1, np.uint16)
"""Say by their type which numbers a compiled function is for."""


def _multiply_block(kind: Any, numbers: Any, like: Any) -> Any: ...


@overload(_multiply_block)
def _(kind, numbers, like):  # type: ignore
    if isinstance(like.dtype, types.Float):
        return lambda kind, numbers, like: _block_float32(kind, numbers)
    return lambda kind, numbers, like: _block_bfloat16(kind, numbers)


# ── a block in registers, as LLVM's vectors ─────────────────────────────────────────────────────────────────


_NUMBERS = types.UniTuple(types.int64, 7)  # type: ignore[no-untyped-call]


def _block(is_bfloat16: bool) -> Any:
    """A function of 8 · rows + panels, and of (x's address and stride, weights' address, steps, out's address
    and stride, whether to add). LLVM may divide vectors of 16, which changes no sum."""

    def type_block(typing_context, kind, numbers):  # type: ignore
        def generate(context, builder, signature, values):  # type: ignore
            kind, numbers = values
            rest = [builder.extract_value(numbers, index) for index in range(_NUMBERS.count)]
            end = builder.append_basic_block("end")
            choice = builder.switch(kind, end)
            for num_rows in range(1, MOST_ROWS + 1):
                for num_panels in {1, panels_of_block.py_func(num_rows)}:  # type: ignore[no-untyped-call]
                    start = builder.append_basic_block(f"rows{num_rows}x{num_panels}")
                    choice.add_case(ir.Constant(_I64, 8 * num_rows + num_panels), start)
                    builder.position_at_end(start)
                    _generate_block(builder, num_rows, num_panels, rest, is_bfloat16)
                    builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(types.int64, _NUMBERS), generate

    return intrinsic(type_block)


def _generate_block(
    builder: Any, num_rows: int, num_panels: int, values: list[Any], is_bfloat16: bool
) -> None:
    x, x_stride, weights, num_steps, out, stride, adds = values
    blocks = range(num_rows), range(num_panels)

    def constant(number: int) -> Any:
        return ir.Constant(_I64, number)

    def at(address: Any, offset: Any, kind: Any) -> Any:
        return builder.inttoptr(builder.add(address, offset), kind.as_pointer())

    def outputs(row: int, panel: int) -> Any:
        offset = builder.add(builder.mul(stride, constant(4 * row)), constant(4 * LANES * panel))
        return at(out, offset, _LANES_F32)

    add_product = _add_pair if is_bfloat16 else _add_product
    x_rows = [builder.add(x, builder.mul(x_stride, constant(4 * row))) for row in blocks[0]]
    panel_bytes = builder.mul(num_steps, constant(4 * LANES))
    w_panels = [builder.add(weights, builder.mul(panel_bytes, constant(panel))) for panel in blocks[1]]
    before, loop = builder.block, builder.append_basic_block("steps")
    builder.branch(loop)
    builder.position_at_end(loop)
    i = builder.phi(_I64)
    i.add_incoming(constant(0), before)
    sums = [[builder.phi(_LANES_F32) for _ in blocks[1]] for _ in blocks[0]]
    offset = builder.mul(i, constant(4 * LANES))
    found = [builder.load(at(panel, offset, _LANES_I32), align=4) for panel in w_panels]
    for row, of_row in zip(x_rows, sums, strict=True):
        word = builder.load(at(row, builder.mul(i, constant(4)), _I32), align=4)
        for panel, total in enumerate(of_row):
            total.add_incoming(ir.Constant(_LANES_F32, [0.0] * LANES), before)
            total.add_incoming(add_product(builder, total, word, found[panel]), loop)
    following = builder.add(i, constant(1))
    i.add_incoming(following, loop)
    store, add, done = (builder.append_basic_block(name) for name in ("store", "add", "done"))
    builder.cbranch(builder.icmp_signed("<", following, num_steps), loop, store)
    builder.position_at_end(store)
    totals = [[total.incomings[1][0] for total in of_row] for of_row in sums]
    plain = builder.append_basic_block("plain")
    builder.cbranch(builder.icmp_signed("!=", adds, constant(0)), add, plain)
    for block in (add, plain):
        builder.position_at_end(block)
        for row in blocks[0]:
            for panel in blocks[1]:
                total = totals[row][panel]
                if block is add:
                    total = builder.fadd(builder.load(outputs(row, panel), align=4), total)
                builder.store(total, outputs(row, panel), align=4)
        builder.branch(done)
    builder.position_at_end(done)


def _everywhere(builder: Any, word: Any) -> Any:
    first = builder.insert_element(ir.Constant(_LANES_I32, ir.Undefined), word, ir.Constant(_I32, 0))
    return builder.shuffle_vector(
        first, ir.Constant(_LANES_I32, ir.Undefined), ir.Constant(_LANES_I32, [0] * LANES)
    )


def _add_product(builder: Any, total: Any, word: Any, weights: Any) -> Any:
    fma = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, ir.FunctionType(_LANES_F32, [_LANES_F32] * 3), f"llvm.fma.v{LANES}f32"
    )
    x, weights = (builder.bitcast(bits, _LANES_F32) for bits in (_everywhere(builder, word), weights))
    return builder.call(fma, [x, weights, total])


def _add_pair(builder: Any, total: Any, word: Any, weights: Any) -> Any:
    if _HAS_BFLOAT16:
        kind = ir.FunctionType(_LANES_F32, [_LANES_F32, _LANES_I32, _LANES_I32])
        operands = [total, _everywhere(builder, word), weights]
        return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", operands, False)
    half, upper = ir.Constant(_I32, 16), ir.Constant(_I32, 0xFFFF0000)
    halves, uppers = (ir.Constant(_LANES_I32, [c.constant] * LANES) for c in (half, upper))
    total = _add_product(builder, total, builder.and_(word, upper), builder.and_(weights, uppers))
    return _add_product(builder, total, builder.shl(word, half), builder.shl(weights, halves))


_block_float32, _block_bfloat16 = _block(False), _block(True)

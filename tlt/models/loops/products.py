"""Products of rows with a matrix, in compiled loops for CPUs.

    W [O, I] ─▶ panels [O / 16, I, 16]
    a block of rows × panels stays in registers: for each input i, sums[row, panel] += x[row, i] · W[panel, i]

An output is the sum of its products in the order of the inputs, in float32, each added by one rounding (fma),
whatever rows and panels are computed with it and by however many threads: its bits depend on its own row
alone. In bfloat16, inputs and weights go in pairs, which some processors add by one instruction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]  # carray is public and not listed
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload
from torch import Tensor

from tlt.base import loops
from tlt.models.loops.numbers import round_to_bfloat16, widen

LANES = 16
"""Outputs of a panel."""

PRODUCT_DTYPES = (torch.float32, torch.bfloat16)

PANELS_AT_ONCE = 16
"""Their weights are read again for every block of rows, from a cache."""

PRODUCTS_PER_THREAD = 250_000
"""Multiplications that justify another thread, which takes some microseconds to wake."""

_U64 = np.uint64
_LANES = _U64(LANES)
"""Indices are unsigned: Numba checks signed ones for negative values, which prevents vectorization."""

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_LANES_F32, _LANES_I32 = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_LANES_I16 = ir.VectorType(ir.IntType(16), LANES)


llvm.initialize_native_asmparser()  # for _add_pair
_FEATURES = set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))

MOST_SUMS = 24 if "+avx512f" in _FEATURES else 6
"""Vectors of 16 that fit into the processor's registers beside weights and inputs."""

MOST_ROWS = MOST_SUMS // 2 if MOST_SUMS > 6 else MOST_SUMS
"""A block has at most so many."""


@njit(inline="always")
def panels_of_block(rows):  # type: ignore
    """Few rows take more panels at once: a sum waits for its last product, so several must be under way."""
    return 4 if 4 * rows <= min(MOST_SUMS, 8) else 2 if 2 * rows <= MOST_SUMS else 1


class Panels:
    """A frozen matrix. Its memory stays where it is when others are loaded.

    weights: [panels, I, 16], in bfloat16 [panels, I / 2, 16, 2]; beyond O and I zeros.
    """

    def __init__(self, num_in: int, num_out: int, dtype: torch.dtype) -> None:
        self.num_in, self.num_out = num_in, num_out
        self.num_panels = -(-num_out // LANES)
        self.in_pairs = 2 if dtype == torch.bfloat16 else 1
        shape = (self.num_panels, -(-num_in // self.in_pairs), LANES, self.in_pairs)
        self.weights = torch.zeros(shape, dtype=dtype)
        self.address = self.weights.data_ptr()
        self.function = compiled(dtype)

    def load(self, weight_OI: Tensor) -> None:
        num_panels, num_steps, *_ = self.weights.shape
        rest = num_steps * self.in_pairs - self.num_in, num_panels * LANES - self.num_out
        padded_OI = F.pad(weight_OI, (0, rest[0], 0, rest[1])) if any(rest) else weight_OI
        self.weights.copy_(padded_OI.reshape(num_panels, LANES, num_steps, -1).transpose(1, 2))

    def multiply(self, x_NI: Tensor, base_NO: Tensor | None = None) -> Tensor:
        """base + x Wᵀ, in the matrix's dtype. base_NO: of N rows or one; None: zeros."""
        num_rows, width, x_NI = len(x_NI), self.num_panels * LANES, self.as_words(x_NI)
        out_NO = torch.empty(num_rows, width)
        if base_NO is not None:
            out_NO[:, : self.num_out] = base_NO
        addresses = (x_NI.data_ptr(), self.address, out_NO.data_ptr())
        num_threads = threads_for(x_NI.numel() * width)
        num_items = min(items_for(num_threads), self.num_panels)
        sizes = (num_rows, self.weights.shape[1], self.num_panels, int(base_NO is not None))
        call = np.array([(0, num_items, *addresses, *sizes)], _CALL)
        loops.Loop(self.function, call, num_threads).run()
        return out_NO[:, : self.num_out].to(self.weights.dtype)

    def as_words(self, x_NI: Tensor) -> Tensor:
        """Rows as the loops read them."""
        is_odd = self.num_in < self.weights.shape[1] * self.in_pairs
        return (F.pad(x_NI, (0, 1)) if is_odd else x_NI).to(self.weights.dtype).contiguous()


def threads_for(num_products: int) -> int:
    return min(torch.get_num_threads(), 1 + num_products // PRODUCTS_PER_THREAD)


def items_for(num_threads: int) -> int:
    """A thread that is late leaves items to the others."""
    return 1 if num_threads == 1 else 2 * num_threads


_CALL = np.dtype(
    [
        *loops.HEAD,
        *((name, "i8") for name in ("x", "weights", "out", "num_rows", "num_steps", "num_panels", "adds")),
    ]
)


def compiled(dtype: torch.dtype) -> int:
    return loops.compiled(_product_float32 if dtype == torch.float32 else _product_bfloat16)


def _product_float32(data):  # type: ignore
    _product(data, carray(data, 1, _CALL)[0], FLOAT32)


def _product_bfloat16(data):  # type: ignore
    _product(data, carray(data, 1, _CALL)[0], BFLOAT16)


@njit(nogil=True, cache=True)
def _product(data, call, like):  # type: ignore
    while True:
        item = loops.take(data)
        if item >= call.num_items:
            return
        first = call.num_panels * item // call.num_items
        end = call.num_panels * (item + 1) // call.num_items
        out, stride = call.out, call.num_panels * LANES
        x = call.x, call.num_steps
        weights = call.weights, like
        multiply_panels(x, call.num_rows, call.num_steps, weights, first, end, (out, stride), call.adds)


@njit(nogil=True, cache=True)
def multiply_float32(x, num_rows, num_in, weights, first, end, out, adds):  # type: ignore
    """`multiply_panels` of float32 inputs, rounded to the weights' type."""
    words = _words(x[0], x[1], num_rows, num_in, weights[1])
    if words.size:
        num_in = (num_in + 1) // 2
        x = np.int64(words.ctypes.data), num_in
    multiply_panels(x, num_rows, num_in, weights, first, end, out, adds)
    return words.size  # they live until here


@njit(nogil=True, cache=True)
def multiply_panels(x, num_rows, num_steps, weights, first, end, out, adds):  # type: ignore
    """Outputs of panels first … end - 1.

    x: (address, words from row to row). out: the same, of float32. A word is a float32, or two bfloat16.
    weights: (address, an array of such numbers).
    adds: whether to add to out, instead of overwriting it.
    """
    x_at, x_stride = x
    weights_at, like = weights
    out_at, stride = out
    num_blocks = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    for start in range(first, end, PANELS_AT_ONCE):
        stop = min(start + PANELS_AT_ONCE, end)
        for block in range(num_blocks):
            row = num_rows * block // num_blocks
            rows = num_rows * (block + 1) // num_blocks - row
            panel = start
            while panel < stop:
                panels = panels_of_block(rows)
                if panel + panels > stop:
                    panels = 1
                into = out_at + (row * stride + panel * LANES) * 4
                from_weights = weights_at + panel * num_steps * LANES * 4
                numbers = x_at + row * x_stride * 4, x_stride, from_weights, num_steps, into, stride, adds
                _multiply_block(8 * rows + panels, numbers, like)
                panel += panels


FLOAT32, BFLOAT16 = np.zeros(1, np.float32), np.zeros(1, np.uint16)


def _words(x: Any, stride: Any, num_rows: Any, num_in: Any, like: Any) -> Any:
    """Rows of float32 numbers as words of the weights' type; empty: they are already."""


def _multiply_block(kind: Any, numbers: Any, like: Any) -> Any: ...


@overload(_words)
def _(x, stride, num_rows, num_in, like):  # type: ignore
    if isinstance(like.dtype, types.Float):
        return lambda x, stride, num_rows, num_in, like: np.empty(0, np.uint32)
    return lambda x, stride, num_rows, num_in, like: _pairs(x, stride, num_rows, num_in)


@overload(_multiply_block)
def _(kind, numbers, like):  # type: ignore
    if isinstance(like.dtype, types.Float):
        return lambda kind, numbers, like: _block_float32(kind, numbers)
    return lambda kind, numbers, like: _block_bfloat16(kind, numbers)


@njit(nogil=True, cache=True)
def _pairs(x, stride, num_rows, num_in):  # type: ignore
    """Rows of x rounded to bfloat16, as [N, I / 2] words: of each pair, the second is in the upper half."""
    half, x = (num_in + 1) // 2, loops.float32_at(x)
    pairs = np.empty(num_rows * half, np.uint32)
    for row in range(np.uint64(num_rows)):
        at, to = row * np.uint64(stride), row * np.uint64(half)
        for i in range(np.uint64(num_in // 2)):
            first, second = at + np.uint64(2) * i, at + np.uint64(2) * i + np.uint64(1)
            pairs[to + i] = round_to_bfloat16(x[first]) | np.uint32(
                round_to_bfloat16(x[second])
            ) << np.uint32(16)
        if num_in % 2:
            pairs[to + np.uint64(half - 1)] = round_to_bfloat16(x[at + np.uint64(num_in - 1)])
    return pairs


# ── panels of what a loop has just computed ─────────────────────────────────────────────────────────────────


@njit(nogil=True, cache=True)
def turn_into_panels(source, at, num_out, num_in, panels):  # type: ignore
    """A matrix [O, I], float32 or the bits of bfloat16, becomes float32 panels [ceil(O / 16), I, 16]. Lanes
    beyond O keep what was there: nobody may use their sums."""
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
    """The same for a matrix [I, O], whose rows already lie as panels want them."""
    whole = num_out // _LANES * _LANES
    for o in range(_U64(0), whole, _LANES):
        for i in range(num_in):
            _copy(source, at + i * num_out + o, panels, o * num_in + i * _LANES)
    for i in range(num_in):
        for o in range(whole, num_out):
            panels[whole * num_in + i * _LANES + o - whole] = widen(source[at + i * num_out + o])


def _load_lanes(context: Any, builder: Any, kind: Any, array: Any, place: Any) -> Any:
    """16 numbers of an array, widened."""
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
    """16 rows of 16 numbers become 16 columns: in each of four steps, pairs of rows exchange halves of their
    groups."""

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


# ── a block in registers, as LLVM's vectors ─────────────────────────────────────────────────────────────────


_NUMBERS = types.UniTuple(types.int64, 7)  # type: ignore[no-untyped-call]


def _block(is_bfloat16: bool) -> Any:
    """A function of 8 · rows + panels, and of (x's address and stride, weights' address, steps, out's address
    and stride, whether to add). LLVM divides vectors of 16 where the processor's are shorter, which changes
    no sum."""

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
    """A step reads a word of every row, and 16 words of every panel."""
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
    """total + x · weights, for the bits of float32 numbers."""
    fma = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, ir.FunctionType(_LANES_F32, [_LANES_F32] * 3), f"llvm.fma.v{LANES}f32"
    )
    x, weights = (builder.bitcast(bits, _LANES_F32) for bits in (_everywhere(builder, word), weights))
    return builder.call(fma, [x, weights, total])


def _add_pair(builder: Any, total: Any, word: Any, weights: Any) -> Any:
    """total + x · weights, for words of two bfloat16 numbers."""
    if "+avx512bf16" in _FEATURES:
        kind = ir.FunctionType(_LANES_F32, [_LANES_F32, _LANES_I32, _LANES_I32])
        operands = [total, _everywhere(builder, word), weights]
        return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", operands, False)
    half, upper = ir.Constant(_I32, 16), ir.Constant(_I32, 0xFFFF0000)
    halves, uppers = (ir.Constant(_LANES_I32, [c.constant] * LANES) for c in (half, upper))
    total = _add_product(builder, total, builder.and_(word, upper), builder.and_(weights, uppers))
    return _add_product(builder, total, builder.shl(word, half), builder.shl(weights, halves))


_block_float32, _block_bfloat16 = _block(False), _block(True)

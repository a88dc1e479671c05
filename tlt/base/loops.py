"""Runs loops compiled by Numba on PyTorch's own threads, with which a second pool would contend for the
cores: in PyTorch's OpenMP library (GCC's, on Linux), else on Python threads. A loop is a C function of a
record's address; every thread takes the record's next item until none is left."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from filelock import FileLock
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]  # carray is public and not listed
from numba.core import cgutils
from numba.core.caching import CacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from torch import Tensor

HEAD = [("next_item", "i8"), ("num_items", "i8")]
"""Every loop's record begins with these fields."""

FEATURES = frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
"""Of the processor that loops are compiled for, in LLVM's words, such as +avx512f."""


class Loop:
    """The record may change between runs.

    address: of the compiled function.
    max_threads: largest useful number of threads.
    """

    def __init__(self, address: int, record_1: Any, max_threads: int) -> None:
        self.address, self.record_1, self.record_at = address, record_1, record_1.ctypes.data
        self.num_threads = min(torch.get_num_threads(), int(record_1["num_items"][0]), max_threads)

    def run(self) -> None:
        self.record_1["next_item"] = 0
        if self.num_threads > 1 and (parallel := _gomp_parallel()) is not None:
            parallel(self.address, self.record_at, self.num_threads, 0)
            return
        others = [_pool().submit(self._call) for _ in range(self.num_threads - 1)]
        self._call()
        for other in others:
            other.result()

    def _call(self) -> None:
        _FUNCTION(self.address)(self.record_at)


def record(dtype: Any, numbers: Mapping[str, float]) -> Any:
    """A field without a number is zero. What the record's addresses point to must outlive the loop."""
    return np.array([tuple(map(numbers.get, dtype.names, repeat(0)))], dtype)


def address_of(array: Any) -> int:
    address: int = array.ctypes.data
    return address


def room_for(sizes: Mapping[str, int]) -> tuple[Tensor, dict[str, int]]:
    """Returns float32 memory of the given sizes, and each array's address."""
    room = torch.empty(sum(sizes.values()))
    begins = accumulate(sizes.values(), initial=0)
    return room, {name: room.data_ptr() + 4 * begin for name, begin in zip(sizes, begins, strict=False)}


_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _gomp_parallel() -> Callable[[int, int, int, int], None] | None:
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):  # other systems have no such library, or no such flag
        return None
    parallel: Any = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return cast("Callable[[int, int, int, int], None]", parallel)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(torch.get_num_threads() - 1, 1), "loops")


@cache
def compiled(function: Any) -> int:
    """Returns the address of a function of its record's address, compiled at first use and kept on disk."""
    with _alone(function):
        signature = types.void(types.int64)
        address = cfunc(signature, cache=True, error_model="numpy")(function).address
    assert address is not None, "it is compiled"
    return address


def _alone(function: Any) -> FileLock:
    folder = Path(FunctionCache(function).cache_path)  # type: ignore[no-untyped-call]
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{function.__module__}.{function.__qualname__}.lock")


class _Stamped:
    """Compiles every loop anew when any file of loops changes: Numba looks at a function's own file alone,
    and would run old code of its callees."""

    @classmethod
    def from_function(cls, function: Any, path: str) -> Any:
        is_ours = Path(path).is_relative_to(_PACKAGE)
        return super().from_function(function, path) if is_ours else None  # type: ignore[misc]

    def get_source_stamp(self) -> tuple[tuple[str, int, int], ...]:
        return _stamp()


_PACKAGE = Path(__file__).parents[1]


@cache
def _stamp() -> tuple[tuple[str, int, int], ...]:
    names = ("loops.py", "loops/*.py", "compiled*.py", "*_stages.py")
    files = sorted(path for name in names for path in _PACKAGE.rglob(name))
    stats = ((path.relative_to(_PACKAGE).as_posix(), path.stat()) for path in files)
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


_LOCATORS: list[Any] = CacheImpl._locator_classes
CacheImpl._locator_classes = [
    *(cast(Any, type)(f"Stamped{known.__name__}", (_Stamped, known), {}) for known in _LOCATORS),
    *_LOCATORS,
]


def _one_at_a_time(function: Any) -> Any:
    """Numba chooses a file's name before it writes the file: two processes that compile at once would choose
    the same."""

    @wraps(function)
    def locked(self: Any, *arguments: Any) -> Any:
        if not Path(self._cache_path).is_dir():
            return function(self, *arguments)
        with FileLock(f"{self._index_path}.lock"):
            return function(self, *arguments)

    return locked


for _name in ("save", "load"):
    setattr(IndexDataCacheFile, _name, _one_at_a_time(getattr(IndexDataCacheFile, _name)))


# ── within a loop ───────────────────────────────────────────────────────────────────────────────────────────


def _pointer(typing_context, address):  # type: ignore
    def generate(context, builder, signature, values):  # type: ignore
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def _add(typing_context, address, number):  # type: ignore
    def generate(context, builder, signature, values):  # type: ignore
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


def _read(typing_context, address):  # type: ignore
    def generate(context, builder, signature, values):  # type: ignore
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), generate


def _call(typing_context, address, numbers):  # type: ignore
    def generate(context, builder, signature, values):  # type: ignore
        number, kind = ir.IntType(64), ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        record = cgutils.alloca_once(builder, number, size=len(numbers))  # type: ignore[no-untyped-call]
        for i, of_kind in enumerate(numbers):
            value = context.cast(builder, builder.extract_value(values[1], i), of_kind, types.int64)
            builder.store(value, builder.gep(record, [ir.Constant(number, i)]))
        function = builder.inttoptr(values[0], kind.as_pointer())
        builder.call(function, [builder.ptrtoint(record, number)])
        return context.get_dummy_value()

    return types.void(types.int64, numbers), generate


call: Any = intrinsic(_call)
"""Calls what `compiled` has returned, with a record of int64s that has a tuple's numbers. A function that is
called by its name is compiled anew into each of its callers, and into theirs."""

add_to: Any = intrinsic(_add)
"""Atomically adds to the int64 at an address; returns what it was."""

_read_atomically: Any = intrinsic(_read)


@njit(inline="always")
def take_item(record):  # type: ignore
    """Atomically takes the next item of the record at an address."""
    return add_to(record, 1)


_SPINS = 1000
"""Looks of a waiting thread before it offers its core to others: some microseconds."""

if os.name == "posix":
    _sched_yield: Any = types.ExternalFunction("sched_yield", types.intc())
else:

    @njit
    def _sched_yield():  # type: ignore
        return 0


@njit(nogil=True, cache=True)
def wait_for(address, number):  # type: ignore
    """Waits until the int64 at an address is at least `number`."""
    spins = 0
    while _read_atomically(address) < number:
        spins += 1
        if spins > _SPINS:
            _sched_yield()


as_pointer: Any = intrinsic(_pointer)
"""An address as the pointer that `carray` takes."""


@njit(inline="always")
def float32_at(address):  # type: ignore
    """No bounds checks."""
    return carray(as_pointer(address), 1, np.float32)


@njit(inline="always")
def int64_at(address):  # type: ignore
    return carray(as_pointer(address), 1, np.int64)


@njit(inline="always")
def uint16_at(address):  # type: ignore
    return carray(as_pointer(address), 1, np.uint16)


REORDERED = {"nsz", "reassoc", "contract", "arcp"}
"""LLVM fast-math flags: enough to vectorize sums. For divisions, add error_model="numpy": Python's looks
for a zero before each."""

_LN2, _LOG2E = np.float32(math.log(2)), np.float32(1 / math.log(2))


@njit(nogil=True, forceinline=True, fastmath=REORDERED)
def exp_of(x):  # type: ignore
    """exp(x) for float32 x ≤ 0, within 2⁻²⁴, at least 2⁻¹²⁶: a power of two times a Taylor polynomial."""
    power = x * _LOG2E
    power = np.float32(-126) if power < np.float32(-126) else power
    whole = np.int32(power - np.float32(0.5))
    rest = (power - np.float32(whole)) * _LN2
    series = np.float32(1 / 5040)
    series = series * rest + np.float32(1 / 720)
    series = series * rest + np.float32(1 / 120)
    series = series * rest + np.float32(1 / 24)
    series = series * rest + np.float32(1 / 6)
    series = series * rest + np.float32(1 / 2)
    series = series * rest + np.float32(1)
    series = series * rest + np.float32(1)
    return series * np.int32(np.int32(whole + np.int32(127)) << np.int32(23)).view(np.float32)

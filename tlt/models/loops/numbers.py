"""Numbers of two types, float32 and the bits of bfloat16, in compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

_U32 = np.uint32


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
    bits = np.float32(number).view(np.uint32)
    return np.uint16(_U32(bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16))

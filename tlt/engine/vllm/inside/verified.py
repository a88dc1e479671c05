"""The draft that a step of vLLM verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Verified(NamedTuple):
    draft: Sequence[int] = ()
    num_accepted: int = 0
    """Draft tokens that the target drew, too; behind the response's end included."""

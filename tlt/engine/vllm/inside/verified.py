"""What a step of vLLM verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Verified(NamedTuple):
    """A draft that a step verified."""

    draft: Sequence[int] = ()
    num_accepted: int = 0
    """Its tokens that the target drew, too; those behind the response's end included."""

"""Whatever tests/faults disturbs has to be there: it names functions of the package in text."""

from __future__ import annotations

import pytest

from tests.faults.disks import FAULTS
from tests.faults.victim import MOMENTS, owner_of


@pytest.mark.parametrize("place", sorted({*MOMENTS.values(), *(fault.function for fault in FAULTS)} - {""}))
def test_each_function_at_which_a_fault_comes_exists(place: str) -> None:
    owner, name = owner_of(place)
    assert callable(getattr(owner, name))

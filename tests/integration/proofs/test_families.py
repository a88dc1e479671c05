"""The whole table of families: every published configuration beside transformers, by what benchmarks/families.py
prints. `make test` has a part of it."""

from __future__ import annotations

import pytest

from tests.unit.models.families import EVERY, precision
from tests.unit.models.measured import measure
from tests.unit.models.test_any import HYBRID, REFUSED

pytestmark = pytest.mark.slow

COMPUTED = [name for name in EVERY if name not in REFUSED]


def test_the_table_has_thirty_configurations_that_are_computed() -> None:
    assert len(COMPUTED) >= 30


@pytest.mark.parametrize("name", COMPUTED)
def test_a_published_configuration_is_computed_as_transformers_computes_it(name: str) -> None:
    found = measure(name)
    for dtype, tolerance in (("float64", precision(name)), ("float32", 1e-4)):
        assert max(found[dtype]["logprob_gap"], found[dtype].get("greedy_gap", 0.0)) < tolerance
        assert found[dtype].get("other", 0) == 0
    assert found.get("other_by_eagle") == (None if name in HYBRID else 0)
    assert found["gradient_error"] < 1e-5
    assert found["adapter_gap"] < 1e-9
    assert found["saved_otherwise"] == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_is_not_computed_is_refused_with_its_reason(name: str) -> None:
    assert measure(name)["refused"].startswith(f"{name}: ")

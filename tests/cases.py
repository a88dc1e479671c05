"""A test's parameters, of which `make test` takes some and `make proofs` the others, too."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(every: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """usual: one of each kind, for `make test`. A case of several parameters is a tuple."""
    return [case if case in usual else _slow(case) for case in every]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)

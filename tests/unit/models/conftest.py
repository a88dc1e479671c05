from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(
    params=[pytest.param(1, id="a thread", marks=pytest.mark.slow), pytest.param(2, id="two threads")]
)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    from tests.threads import computing_by  # needs Numba

    with computing_by(request.param):
        yield

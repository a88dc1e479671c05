"""One vLLM for many tests: a start takes longer than all that it is asked here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.parts import BASE, DRAFTER, own_engine, vllm_engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets those go first that need vLLM's worker in this process: once retrieval has drafted here,
    workers have processes."""
    items.sort(key=lambda item: "vllm/test_live.py" not in item.nodeid)


@pytest.fixture(scope="session")
def own() -> Any:
    return own_engine(BASE)


@pytest.fixture(scope="session")
def live() -> Iterator[Any]:
    engine = vllm_engine(BASE, "4x1x4", DRAFTER)
    yield engine
    engine.link.close()

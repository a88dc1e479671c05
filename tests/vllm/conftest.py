"""One vLLM for many tests: a start takes longer than all that it is asked here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.parts import BASE, DRAFTER, own_engine, vllm_engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs vLLM's worker in this process goes first: once retrieval has drafted here, a worker has a process of its own."""
    items.sort(key=lambda item: "test_live.py" not in item.nodeid)


@pytest.fixture(scope="session")
def own() -> Any:
    """Our own engine with the recipe's model."""
    return own_engine(BASE)


@pytest.fixture(scope="session")
def live() -> Iterator[Any]:
    """vLLM in this process, with the recipe's model and its trained drafter."""
    engine = vllm_engine(BASE, "4x1x4", DRAFTER)
    yield engine
    engine.link.close()

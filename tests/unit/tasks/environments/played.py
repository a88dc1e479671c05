"""Adapters of other libraries' environments, asked as workers ask: by stand-ins wherever tests run, and by the
libraries where they are installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tlt.tasks.environments.environment import Answer, Ask, Environments, EnvironmentSpec

ADAPTERS = "tlt.tasks.environments"


@contextmanager
def library(name: str, is_stand_in: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imported anew within, and gone afterwards, as is its adapter."""
    _forget(name)
    if is_stand_in:
        monkeypatch.syspath_prepend(Path(__file__).parent / "stand_ins")
    else:
        pytest.importorskip(name, reason=f"{name} is not installed")
    yield
    _forget(name)


def _forget(name: str) -> None:
    for known in [*sys.modules]:
        if known.partition(".")[0] == name or known == f"{ADAPTERS}.{name}":
            del sys.modules[known]


def environments(factory: str) -> Environments:
    """factory: "adapter:Class"."""
    return Environments(EnvironmentSpec(factories={"": f"{ADAPTERS}.{factory}"}))


def begin(asked: Environments, row: dict[str, Any]) -> str | None:
    return asked.answer(Ask("observe", row)).text


def say(asked: Environments, row: dict[str, Any], text: str, state: str) -> Answer:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return asked.answer(Ask("respond", row, state, messages=messages))


def reward(asked: Environments, row: dict[str, Any], state: str) -> float | None:
    return asked.answer(Ask("reward", row, state)).reward

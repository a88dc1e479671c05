"""A step begins only if it, as long as the one before, and the last evaluation end in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tlt.training import loop


@pytest.mark.parametrize(
    ("step_seconds", "evaluation_seconds", "is_over"),
    [(0.0, 0.0, False), (2.0, 0.0, False), (4.0, 0.0, True), (0.0, 4.0, True), (2.0, 2.0, True)],
)
def test_the_step_and_the_evaluation_are_counted(
    step_seconds: float, evaluation_seconds: float, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """57 of 60 seconds are spent."""
    monkeypatch.setattr(loop, "broadcast_json", lambda world, value: value)
    files = SimpleNamespace(evaluations=SimpleNamespace(latest_seconds=evaluation_seconds))
    config = SimpleNamespace(run=SimpleNamespace(time_limit_minutes=1.0))
    run: Any = SimpleNamespace(config=config, seconds=57.0, files=files, world=None)
    assert loop.is_out_of_time(run, step_seconds) is is_over

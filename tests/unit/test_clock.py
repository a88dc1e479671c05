"""A moment that processes count from, whatever the time of day is set to."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from tlt.base import clock
from tlt.base.clock import Moment


def test_another_process_of_the_machine_counts_from_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    told = json.loads(json.dumps(dataclasses.asdict(Moment.now().to_send())))
    monkeypatch.setattr(time, "monotonic", lambda: 1042.0)
    assert Moment(**told).here().seconds == 42.0


def test_another_machine_counts_on_from_what_had_passed_when_it_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    began = Moment.now()
    monkeypatch.setattr(time, "monotonic", lambda: 1042.0)
    told = began.to_send()
    monkeypatch.setattr(clock, "machine_name", lambda: "started this morning")
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    here = told.here()
    assert here.seconds == 42.0
    monkeypatch.setattr(time, "monotonic", lambda: 8.0)
    assert here.seconds == 43.0

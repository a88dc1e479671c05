"""The remedies of two thousand refused and accepted plans, followed."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.apps.plan.remedies import check, draw_asked, write_run

pytestmark = pytest.mark.slow


def test_every_remedy_of_two_thousand_plans_makes_the_run_fit(tmp_path: Path) -> None:
    chance, found = random.Random(0), Counter[str]()
    for model in range(250):
        write_run(folder := tmp_path / str(model), chance)
        found.update(check(draw_asked(folder, chance)) for _ in range(8))
    assert min(found["fits"], found["advised"], found["none"]) >= 200, found

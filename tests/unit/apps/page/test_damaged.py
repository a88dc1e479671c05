"""A run with a damaged file is a page or a status, or one line, never a traceback. A small part of what
tests/integration/proofs/test_damaged_runs.py tries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.apps.page.damage import (
    Damage,
    damage,
    damages,
    make_sound,
    sample,
    show_page,
    show_status,
    surprises,
)
from tests.unit.apps.page.synthetic import make_conversation
from tlt.apps.page.gather import read_run
from tlt.apps.page.response_sample import show_responses
from tlt.base.types import UserError


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sound(tmp_path_factory.mktemp("runs") / "run")


def test_the_status_of_a_damaged_run_is_shown_or_one_line(sound: Path) -> None:
    assert surprises(sound, sample(sound, 60, seed=0), show_status) == []


def test_the_page_of_a_damaged_run_is_made_or_one_line(sound: Path) -> None:
    assert surprises(sound, sample(sound, 1, seed=0), show_page) == []


def test_damaged_turns_are_shown_or_one_line(tmp_path: Path) -> None:
    def show(folder: Path) -> None:
        json.dumps(show_responses([read_run(folder, "run")]), allow_nan=False)

    sound = make_sound(tmp_path / "run", make_conversation)
    todo = [one for one in damages(sound) if one[1][:1] == ("turns",) and "responses" in one[0]]
    assert len(todo) > 500
    assert surprises(sound, todo[::3], show) == []


KNOWN: list[Damage] = [
    ("responses/rollout-00000001.jsonl", ("reward",), "1e400"),
    ("metrics.jsonl", ("step",), "1" + "0" * 30),
    ("responses/rollout-00000001.jsonl", ("token_ids", 0), "1" + "0" * 20),
    ("config.json", ("rewards",), '{"functions": 7}'),
]


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, id=f"{one[0]} {one[1][0]}", marks=[pytest.mark.slow] * (one not in KNOWN[:2]))
        for one in KNOWN
    ],
)
def test_what_once_was_a_traceback_is_none(sound: Path, one: Damage) -> None:
    assert surprises(sound, [one], show_page) == []


@pytest.mark.parametrize("odd", ["1e400", "-3", '"7"'])
def test_a_number_of_steps_that_is_none_is_one_line_of_the_status(
    sound: Path, odd: str, tmp_path: Path
) -> None:
    folder = make_sound(tmp_path / "run")
    damage(folder, "config.json", ("run", "num_steps"), odd)
    with pytest.raises(UserError, match=r"config.json: cannot be read .*bring the run's file back"):
        show_status(folder)

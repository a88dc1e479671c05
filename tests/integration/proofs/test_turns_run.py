"""Five whole steps with tools: the same tokens, rewards, weights and calls with speculation and without, however
long the tools take, in any batch, on one rank and two, with responses handed over and preempted.

The reference of each case is the run without speculation whose tools answer at once.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.hf.checkpoint_parts import hash_of
from tests.unit.training.environments import parts
from tests.unit.training.environments.test_turns import configure, tokens_of
from tlt.apps.api import train
from tlt.engine.memory import CacheMemory
from tlt.training.report.step_record import StepRecord, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 5
KV_GIB = 0.00022
"""In float64; holds the longest response."""


@dataclass(frozen=True)
class Case:
    """delay: seconds of a call, or its bounds; kv_gib: of keys and values, None: as many as are needed, else so few
    that sequences, which are let in without room to grow, are put back."""

    speculation: str
    delay: str = "0"
    kv_gib: float | None = None


DELAYED = (Case("off", "0.05"), Case("ngram:3x1x3", "0.05"), Case("ngram:3x2x6", "0:0.2"))
PREEMPTED = (Case("ngram:3x1x3", "0:0.1", KV_GIB), Case("off", "0", KV_GIB))
LATE = (Case("ngram:3x1x3", "2"),)
"""Calls of two seconds; the batch is small, for they add up."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"intermediate_size": 48}  # a multiple of 16, for equal rows
    return parts.write_model(tmp_path_factory.mktemp("turns") / "model", **sizes)


@dataclass(frozen=True)
class Outcome:
    told: Any
    """What must be the same."""
    records: list[StepRecord]

    def sum(self, figure: str) -> int:
        return sum(getattr(record.rollout, figure) for record in self.records)


@pytest.mark.parametrize("exact", ["float64", "equal rows"])
@pytest.mark.parametrize(
    ("batch", "num_ranks", "cases"),
    [
        (1, 1, DELAYED),
        (4, 1, LATE),
        (16, 1, DELAYED),
        (16, 2, DELAYED),
        (64, 1, PREEMPTED),
        (64, 2, DELAYED),
    ],
)
def test_five_steps_are_the_same(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exact: str,
    batch: int,
    num_ranks: int,
    cases: tuple[Case, ...],
) -> None:
    problems = min(max(batch // 4, 1), 4)

    def run(case: Case) -> Outcome:
        folder = tmp_path / f"{case.speculation}-{case.delay}-{case.kv_gib}".replace(":", "-")
        calls = folder.with_suffix(".calls")
        calls.touch()
        monkeypatch.setenv("TLT_TEST_CALLS", str(calls))
        monkeypatch.setenv("TLT_TEST_DELAY", case.delay)
        if case.kv_gib is not None:
            monkeypatch.setattr(CacheMemory, "fits_longer", CacheMemory.has_room)
        sections: dict[str, dict[str, Any]] = {
            "run": {
                "num_ranks": num_ranks,
                "num_steps": NUM_STEPS,
                "out_dir": str(folder),
                "dtype": "float64" if exact == "float64" else "float32",
                "equal_rows": exact != "float64",
            },
            "rollout": {
                "problems_per_step": problems,
                "samples_per_problem": max(batch // problems, 4),
                "max_batch_size": batch,
                "speculation": case.speculation,
                "kv_gib": case.kv_gib and case.kv_gib / (1 if exact == "float64" else 2),
            },
            "environment": {"num_workers": 8},
            "sampling": {"max_tokens": 160},
        }
        assert train(configure(model, folder, "tools", **sections)).is_finished
        records = read_metrics(folder / "metrics.jsonl")
        rewards = [
            json.loads(line)["rewards"] for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        asked = Counter(calls.read_text().splitlines())
        return Outcome((hash_of(folder / "policy"), sorted(tokens_of(folder)), rewards, asked), records)

    expected = run(Case("off"))
    assert expected.told[0] != hash_of(model)
    assert sum(expected.told[3].values()) > NUM_STEPS
    migrated = 0
    for case in cases:
        found = run(case)
        for one, other in zip(found.told, expected.told, strict=True):
            assert one == other, case
        assert (found.sum("num_preemptions") > 0) == (case.kv_gib is not None), case
        migrated += found.sum("num_migrated")
    assert num_ranks == 1 or migrated > 0

"""A seeded few of the mutations that tests/faults tries by the thousand, and that the judge would see
a damage get by."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.checkpoint_mutations import KINDS, NUM_RANKS, Saved, save_run, try_one
from tlt.training.saved import checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutations") / "checkpoints"


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[int, Saved]:
    return save_run(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_found_out_or_does_no_harm(
    kind: str, folder: Path, saved: dict[int, Saved]
) -> None:
    for seed in range(4):
        newest, older = try_one(folder, saved, kind, random.Random(f"{kind} {seed}"))
        assert newest == ("harmless" if kind == "a stray file" else "detected"), seed
        assert older in ("detected", "harmless", "")


@pytest.mark.parametrize("kind", ["bits flipped", "exchanged between steps"])
def test_the_judge_sees_what_digests_would_have_found(
    kind: str, folder: Path, saved: dict[int, Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "verify_files", lambda *_: None)
    outcomes = {try_one(folder, saved, kind, random.Random(seed))[0].partition(":")[0] for seed in range(12)}
    assert "silent" in outcomes, NUM_RANKS

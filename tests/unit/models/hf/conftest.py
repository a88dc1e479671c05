"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.models.hf.checkpoint_parts import CASES, theirs


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small qwen2 checkpoint as transformers writes it."""
    theirs("qwen2").save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"

"""A full disk, met by whatever writes weights: one line that says so, and nothing half-written left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors import SafetensorError

from tests.lossless.helpers import CONFIG
from tlt.drafter.folder import save_drafter
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.models.hf_weights import expected_shapes, save_model
from tlt.training.checkpoint import Checkpoint, RunState, save_checkpoint
from tlt.types import UserError

FULL = Path("/dev/full")
"""Refuses every byte as a full disk does."""


def write_model(folder: Path) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in expected_shapes(CONFIG).items()}
    save_model(folder, CONFIG, tensors, dtype=torch.float32, source=None)


def write_drafter(folder: Path) -> None:
    save_drafter(folder, DraftModel(drafter_shape(CONFIG)).initialize(1), torch.float32)


def write_checkpoint(folder: Path) -> None:
    save_checkpoint(folder.parent, Checkpoint(RunState(1, 0, "abc"), {"w": torch.zeros(2)}, None, {"m": torch.zeros(100_000)}))


@pytest.mark.parametrize("write", [write_model, write_drafter, write_checkpoint])
def test_weights_that_meet_a_full_disk_are_one_line_and_leave_nothing(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:  # an error of its own kind, as on a full tmpfs
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("tlt.models.hf_weights.save_file", full)
    with pytest.raises(UserError, match=r"cannot be written \(.*No space left on device.*\); make room"):
        write(tmp_path / "weights")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which Linux has")
def test_optimizer_states_that_meet_a_full_disk_are_one_line_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_to_full_disk(save: Callable[[Any, BinaryIO], None], value: Any, file: Any) -> None:
        with FULL.open("wb", buffering=0) as full:
            save(value, full)

    monkeypatch.setattr(torch, "save", functools.partial(save_to_full_disk, torch.save))
    with pytest.raises(UserError, match=r"step-00000001: cannot be written \(No space left on device\); make room"):
        write_checkpoint(tmp_path / "weights")
    assert list(tmp_path.iterdir()) == []

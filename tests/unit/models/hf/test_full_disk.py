"""A full disk, met by whatever writes weights: one line that says so, and nothing half-written left.
Checkpoints of a run: test_checkpoint_kills.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from tests.lossless.helpers import CONFIG
from tests.refused import refused
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.models.hf.weights import expected_shapes, save_model


def write_model(folder: Path) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in expected_shapes(CONFIG).items()}
    save_model(folder, CONFIG, tensors, dtype=torch.float32, source=None)


def write_drafter(folder: Path) -> None:
    save_drafter(folder, new_model(drafter_shape(CONFIG)).initialize(1), torch.float32)


@pytest.mark.parametrize("write", [write_model, write_drafter])
def test_weights_that_meet_a_full_disk_are_one_line_and_leave_nothing(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:  # an error of its own kind, as on a full tmpfs
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("tlt.models.hf.weights.save_file", full)
    with refused(r"cannot be written \(.*No space left on device.*\); make room"):
        write(tmp_path / "weights")
    assert list(tmp_path.iterdir()) == []

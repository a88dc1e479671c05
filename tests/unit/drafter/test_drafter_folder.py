"""Drafter folders: read back as they were saved, and refused in one line where they are not whole."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.lossless.helpers import CONFIG
from tests.unit.drafter.parts import MODEL
from tlt.assembly.engine import EngineSettings, _make_tuner
from tlt.drafter.formats.folder import StoredDrafter, load_drafter, save_drafter
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.hf.weights import content_hash
from tlt.tuning.cost_model import CostModel
from tlt.types import UserError


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _edit(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no directory": (shutil.rmtree, "config.json is missing"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json is missing"),
    "no tensor": (
        lambda p: _edit(p / "model.safetensors", lambda t: t.pop("fc.weight")),
        "fc.weight is missing",
    ),
    "odd tensor": (lambda p: _edit(p / "model.safetensors", lambda t: t.update(odd=torch.ones(2))), "odd is"),
    "other shape": (
        lambda p: _edit(p / "model.safetensors", lambda t: t.update({"fc.weight": torch.ones(3, 4)})),
        "fc.weight is \\[3, 4\\]",
    ),
    "cut short": (lambda p: _truncate(p / "model.safetensors"), "cannot be read"),
    "other architecture": (
        lambda p: (p / "config.json").write_text('{"architectures": ["X"]}'),
        "architectures",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_drafter_that_is_not_whole_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "drafter"
    save_drafter(path, MODEL, torch.float32)
    apply, message = DAMAGES[damage]
    apply(path)
    with pytest.raises(UserError, match=message) as caught:
        load_drafter(path, CONFIG)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    save_drafter(tmp_path, MODEL, torch.float32)
    with pytest.raises(UserError, match="drafter for this model"):
        load_drafter(tmp_path, replace(CONFIG, hidden_size=64))


def kill(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_drafter_folder_is_replaced_only_when_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "drafter", DraftModel(drafter_shape(CONFIG)).initialize(1)
    save_drafter(path, model, torch.float32)
    monkeypatch.setattr("tlt.drafter.formats.folder.drafter_to_hf", kill)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(path, DraftModel(drafter_shape(CONFIG)).initialize(2), torch.float32)
    assert content_hash(load_drafter(path, CONFIG).tensors) == content_hash(dict(model.state_dict()))


def test_a_drafter_folder_with_numbers_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    model = DraftModel(drafter_shape(CONFIG)).initialize(1)
    with torch.no_grad():
        model.fc.weight[0, 0] = math.nan
    save_drafter(tmp_path / "drafter", model, torch.float32)
    with pytest.raises(UserError, match=r"fc\.weight holds numbers that are not finite"):
        load_drafter(tmp_path / "drafter", CONFIG)


@pytest.mark.parametrize(
    ("about", "acceptance"), [({"acceptance": 0.6}, 0.6), ({}, None), ({"acceptance": None}, None)]
)
def test_the_acceptance_that_was_recorded_after_training_is_read(
    about: dict[str, Any], acceptance: float | None
) -> None:
    stored = StoredDrafter(MODEL.config, {}, about)
    assert stored.acceptance == acceptance
    tuner = _make_tuner(CONFIG, EngineSettings(speculation="adaptive"), stored, ("learned",))
    assert isinstance(tuner, CostModel)
    assert tuner.acceptance.recorded == acceptance

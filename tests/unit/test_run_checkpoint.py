"""Checkpoints of a run: what they hold, which of them stay, and what resuming refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.lossless.helpers import CONFIG
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.models.hf_weights import content_hash
from tlt.training.checkpoint import Checkpoint, CheckpointWriter, RunState, latest_checkpoint, load_checkpoint, save_checkpoint
from tlt.training.drafter_side import restore
from tlt.types import UserError


def make_checkpoint(step: int, value: float = 1.0) -> Checkpoint:
    training = {"policy": {"state": {0: {"exp_avg": torch.full((3,), value)}}, "lrs": [1.0, 2.0]}, "note": None}
    return Checkpoint(RunState(step, 4), {"w": torch.full((2, 2), value)}, {"fc": torch.full((2,), value)}, training)


def test_a_checkpoint_holds_what_was_when_it_was_saved(tmp_path: Path) -> None:
    writer, given = CheckpointWriter(tmp_path / "c"), make_checkpoint(3)
    writer.save(given)
    for tensor in (given.policy["w"], given.drafter["fc"], given.training["policy"]["state"][0]["exp_avg"]):
        tensor.fill_(9.0)  # training goes on while the thread writes
    writer.wait()
    path = latest_checkpoint(tmp_path / "c")
    assert path is not None
    found = load_checkpoint(path, torch.device("cpu"))
    assert found.state == RunState(3, 4)
    assert found.policy["w"].tolist() == [[1, 1], [1, 1]]
    assert found.drafter is not None
    assert found.drafter["fc"].tolist() == [1, 1]
    assert found.training["policy"]["state"][0]["exp_avg"].tolist() == [1, 1, 1]
    assert found.training["policy"]["lrs"] == [1.0, 2.0]


def test_only_the_newest_whole_checkpoint_stays(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.new").mkdir()
    for step in (1, 2, 2, 10):
        save_checkpoint(tmp_path, make_checkpoint(step, step))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_a_newer_checkpoint_is_never_removed(tmp_path: Path) -> None:
    for step in (20, 5, 10):
        save_checkpoint(tmp_path, make_checkpoint(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_a_writer_that_fails_says_so_at_the_next_checkpoint_and_leaves_the_last_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.save(make_checkpoint(1))
    writer.wait()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)  # after the weights have been written
        writer.save(make_checkpoint(2))
        with pytest.raises(UserError, match=r"checkpoint of step 2 .*No space left.*the one before, .*step-00000001, is whole"):
            writer.save(make_checkpoint(3))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    writer.save(make_checkpoint(3))
    writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_first_checkpoint_that_fails_does_not_promise_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter(tmp_path / "file" / "checkpoints")
    writer.save(make_checkpoint(10))
    with pytest.raises(UserError, match=r"checkpoint of step 10 is not written \(.*\); there is none before it"):
        writer.wait()


DAMAGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor] | None]] = {
    "no drafter": lambda tensors: None,
    "another drafter": lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "fc.weight"},
    "another drafter (x)": lambda tensors: tensors | {"x": torch.zeros(1)},
    "another drafter (fc": lambda tensors: tensors | {"fc.weight": torch.zeros(2, 2)},
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_run_never_goes_on_with_a_drafter_that_its_checkpoint_does_not_hold(message: str) -> None:
    model = DraftModel(drafter_shape(CONFIG)).initialize(1)
    trained = dict(model.named_parameters())
    before = content_hash(model.state_dict())
    stored = {name: tensor.detach() + 1 for name, tensor in trained.items()}
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        restore(trained, DAMAGES[message](stored), Path("checkpoint"))
    assert content_hash(model.state_dict()) == before
    restore(trained, stored, Path("checkpoint"))
    assert content_hash(model.state_dict()) == content_hash(stored)

"""Checkpoints of small runs, written by one or more ranks within this process: what the tests of
checkpoints are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tlt.base.types import UserError
from tlt.training.ranks.world import World
from tlt.training.saved.checkpoint import Checkpoint, CheckpointWriter, find_checkpoint, load_checkpoint


def make_worlds(num_ranks: int = 1) -> list[World]:
    """Ranks of one process, which share a store and have no collectives."""
    store = dist.HashStore()
    return [World(rank, num_ranks, rank, torch.device("cpu"), store, None) for rank in range(num_ranks)]


ALONE = make_worlds()[0]


def make_tensors(value: float = 1.0) -> dict[str, Tensor]:
    shapes = {
        "policy.embed": (7, 3),
        "policy.norm": (5,),
        "policy_optimizer.step.norm": (),
        "drafter.fc": (4, 2, 3),
    }
    tensors = {}
    for name, shape in shapes.items():
        dtype = torch.float32 if "drafter" in name else torch.float64
        tensors[name] = value * (1 + torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape))
    return tensors


def make_checkpoint(step: int, value: float = 1.0, rank: int = 0) -> Checkpoint:
    counters = {"policy": {"next_step": step}, "value": value}
    return Checkpoint(step, "run", make_tensors(value), counters, {"rank": rank, "step": step})


def save(folder: Path, step: int, value: float = 1.0, num_ranks: int = 1, keep: int = 2) -> None:
    """Writes a checkpoint as so many ranks."""
    writers = [CheckpointWriter(folder, world, keep) for world in make_worlds(num_ranks)]
    for rank, writer in enumerate(writers):
        writer.save(make_checkpoint(step, value, rank))
    for writer in writers:
        writer.wait()


def save_checkpoint(folder: Path, checkpoint: Checkpoint, world: World = ALONE) -> None:
    """Writes a checkpoint in the foreground; every rank calls it."""
    writer = CheckpointWriter(folder, world)
    writer.save(checkpoint)
    writer.wait()


def load(
    folder: Path, world: World = ALONE
) -> tuple[dict[str, Tensor], dict[str, Any], list[dict[str, Any]]]:
    """Returns (tensors, counters, what single ranks knew) of the newest checkpoint."""
    found = find_checkpoint(folder, ALONE)
    assert found is not None
    path, manifest = found
    tensors = {name: torch.full_like(tensor, -1) for name, tensor in make_tensors().items()}
    own = load_checkpoint(path, manifest, tensors, world)
    return tensors, manifest.counters, own


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_holds(folder: Path, step: int, value: float = 1.0, world: World = ALONE) -> None:
    """The newest checkpoint is that of this step, whole."""
    tensors, counters, own = load(folder, world)
    for name, tensor in make_tensors(value).items():
        assert torch.equal(tensors[name], tensor), name
    assert counters == {"policy": {"next_step": step}, "value": value}
    assert [known["step"] for known in own] == [step] * len(own)


def refusal(action: Any, *arguments: Any) -> str:
    """The message, which must be one line."""
    with pytest.raises(UserError) as caught:
        action(*arguments)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message

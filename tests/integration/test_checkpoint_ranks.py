"""Shards on real ranks: three processes over gloo save and load as one, two and three ranks, replicated
and sharded in turn."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.forked import fork_ranks, run_ranks
from tests.unit.training.saved.saved_parts import save_checkpoint
from tlt.base.types import UserError
from tlt.training.ranks.world import World
from tlt.training.saved.checkpoint import Checkpoint, find_checkpoint, load_checkpoint


def make_tensors(value: float) -> dict[str, Tensor]:
    """Rows that no number of ranks divides evenly, fewer rows than ranks, a column to shard along, and a
    scalar."""
    shapes = {
        "policy.embed": (11, 4),
        "policy.short": (2, 3),
        "policy.wide": (3, 10),
        "policy.norm": (7,),
        "policy.step": (),
    }
    return {
        name: value + torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) / 7
        for name, shape in shapes.items()
    }


def shard(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Shards all but the scalar, as FSDP2 does, one of them along its columns; one is replicated over the
    mesh."""
    mesh = DeviceMesh.from_group(world.group, "cpu")
    placements: dict[str, Any] = {"policy.wide": Shard(1), "policy.norm": Replicate()}
    return {
        name: distribute_tensor(tensor, mesh, [placements.get(name, Shard(0))]) if tensor.dim() else tensor
        for name, tensor in tensors.items()
    }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_and_load(
    folder: Path, world: World, again: World, is_sharded: tuple[bool, bool], value: float
) -> None:
    """Saves as the ranks of one world and loads as those of another; all processes call it."""
    given, empty = make_tensors(value), make_tensors(-1e9)
    if world.rank >= 0:
        state = shard(given, world) if is_sharded[0] else given
        save_checkpoint(folder, Checkpoint(1, "run", state, {"v": value}, {"rank": world.rank}), world)
    dist.barrier()
    if again.rank >= 0:
        found = find_checkpoint(folder, again)
        assert found is not None
        target = shard(empty, again) if is_sharded[1] else empty
        own = load_checkpoint(*found, target, again)
        assert found[1].counters == {"v": value}
        assert own[0] == {"rank": again.rank % world.world_size}
        for name, tensor in target.items():
            assert torch.equal(whole(tensor), given[name]), name
            assert isinstance(tensor, DTensor) == (is_sharded[1] and tensor.dim() > 0)
    dist.barrier()


def check_shards(rank: int, worlds: list[World], folder: Path) -> None:
    pairs = [(writers, readers) for writers in worlds for readers in worlds]
    ways = ((True, True), (True, False), (False, True))
    for number, (writers, readers) in enumerate(pairs):
        save_and_load(folder / str(number), writers, readers, ways[(number + number // 3) % 3], float(number))
    save_and_load(folder / "sharded", worlds[2], worlds[1], (True, True), 99.0)
    sizes = [file.stat().st_size for file in folder.glob("sharded/step-*/*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) < 0.7 * sum(sizes), "every rank wrote its own"


def check_damage(rank: int, worlds: list[World], folder: Path) -> None:
    """What one rank finds damaged stops all of them, in the same words."""
    world = worlds[2]
    given = make_tensors(1.0)
    save_checkpoint(folder, Checkpoint(1, "run", shard(given, world), {}, {}), world)
    dist.barrier()
    if rank == 0:
        file = folder / "step-00000001" / "rank-00002.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    target = shard(make_tensors(0.0), world)
    found = find_checkpoint(folder, world)
    assert found is not None
    with pytest.raises(UserError, match=r"rank-00002\.safetensors: is not as it was written"):
        load_checkpoint(*found, target, world)
    assert all(torch.equal(whole(tensor), make_tensors(0.0)[name]) for name, tensor in target.items())


def rank_main(rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    port = int((folder.parent / "port").read_text())
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=num_ranks)
    worlds = []
    for size in range(1, num_ranks + 1):
        group = dist.new_group(list(range(size)))
        mine = rank if rank < size else -1  # outside of it
        worlds.append(
            World(mine, size, rank, torch.device("cpu"), dist.PrefixStore(f"of {size}", store), group)
        )
    for check in (check_shards, check_damage):
        check(rank, worlds, folder / check.__name__)
        dist.barrier()


def test_shards_are_saved_and_loaded_by_any_number_of_ranks_and_damage_stops_all_of_them(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    run_ranks(__file__, tmp_path, 3)


if __name__ == "__main__":
    fork_ranks(rank_main)

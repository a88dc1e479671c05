"""The world of ranks, and the few collectives the package needs. Every rank of the world calls each of them, or none does.

Does not know who started the ranks (launch.py) nor how work is shared out while they generate (coordinator.py).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlt.types import UserError


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks.

    store: the c10d Store of the run (a HashStore when this process is alone).
    group: the default process group, or None when this process is alone: then no collective communicates.
    device: where this rank computes.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: dist.Store
    group: dist.ProcessGroup | None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


def init_process_group_from_env(device: str | torch.device = "cpu", timeout_seconds: float = 600.0) -> World:
    """Joins the ranks that the environment names (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: torchrun's
    convention). Without RANK this process is a world of one, and no process group is made. gloo serves tensors on the
    CPU; NCCL, where the device is a GPU, those on it (both are then set up: objects travel over gloo)."""
    device = torch.device(device)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            found = torch.cuda.device_count()
            raise UserError(f"device: cuda for rank {local_rank} of this machine, which has {found} GPU(s); give fewer ranks")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World(0, 1, local_rank, device, dist.HashStore(), None)
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size, timeout=timeout)
    return World(rank, world_size, local_rank, device, store, dist.group.WORLD)


def shutdown(world: World) -> None:
    """Leaves the ranks together. Drop models, optimizers and coordinators first: what still refers to the group when the
    interpreter shuts down makes gloo abort (about 30 % of runs without the barrier and the collection)."""
    if world.group is None:
        return
    dist.barrier(world.group)
    gc.collect()
    dist.destroy_process_group()


def gather_objects(world: World, value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks, on every rank. Values are pickled: for small things."""
    if world.group is None:
        return [value]
    values: list[Any] = [None] * world.world_size
    dist.all_gather_object(values, value, group=world.group)
    return values


def any_rank(world: World, is_true: bool) -> bool:
    """Whether it is true on any rank: the same answer on all, to act together on what ranks see at different times."""
    return any(gather_objects(world, is_true))


def average_weighted(world: World, tensors: Sequence[Tensor], weight: float) -> float:
    """Replaces each tensor by sum(weight × tensor) / sum(weight) over the ranks, in place, and returns the total weight.

    With a total of 0 nothing changes. A rank of weight 0 contributes nothing, not even its NaNs; a rank that has all the
    weight passes its tensors on bit for bit (weights are normalized first: a factor of exactly 1). The tensors travel as one
    flat bucket on the first one's device, in float64 if any is float64 and in float32 otherwise; shapes and order must agree
    over the ranks. They may lie on several devices (AdamW counts its steps on the CPU).
    """
    assert weight >= 0, f"weight {weight}"
    assert all(tensor.is_floating_point() for tensor in tensors), "only floating-point tensors have an average"
    if world.group is None:
        return weight
    weights = torch.zeros(world.world_size, dtype=torch.float64)
    weights[world.rank] = weight
    device = _bucket_device(tensors)
    weights = weights.to(device)
    dist.all_reduce(weights, group=world.group)
    total = float(weights.sum())
    if total == 0 or not tensors:
        return total
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    with torch.no_grad():
        bucket = torch.cat([tensor.detach().reshape(-1).to(device, wide) for tensor in tensors])
        bucket = bucket * (weight / total) if weight > 0 else torch.zeros_like(bucket)
        dist.all_reduce(bucket, group=world.group)
        for tensor, part in zip(tensors, bucket.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
    return total


def broadcast_tensors(world: World, tensors: Sequence[Tensor], source: int = 0) -> None:
    """Gives every rank the source rank's tensors, in place, bit for bit: one flat bucket per dtype."""
    if world.group is None:
        return
    with torch.no_grad():
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            bucket = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            dist.broadcast(bucket, src=source, group=world.group)
            for tensor, part in zip(same, bucket.split([tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _bucket_device(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")

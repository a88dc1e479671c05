"""The world of ranks: who this process is, where it computes, and the few collectives that the package needs.

Every rank of the world calls each collective, or none does. This file does not know who started the ranks (launch.py) nor
how work is shared out while they generate (work_queue.py).
"""

from __future__ import annotations

import gc
import math
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlt.types import UserError

ABSENT = b"-"
"""The value that `read_now` gives for a key that the store does not hold."""


@dataclass(frozen=True)
class World:
    """Says who this process is among the ranks.

    local_rank: its number on this machine.
    device: where it computes.
    store: the c10d Store of the run (a HashStore when this process is alone).
    group: the default process group, or None when this process is alone: then no collective communicates.
    timeout_seconds: how long a collective waits for the other ranks; infinite when this process is alone.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: dist.Store
    group: dist.ProcessGroup | None
    timeout_seconds: float = math.inf

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class DeviceChoice:
    """The kind of device that ranks compute on ("cpu" or "cuda"), and why, in a few words for the user."""

    name: str
    reason: str


def choose_device(wanted: str, num_ranks: int, num_gpus: int) -> DeviceChoice:
    """Decides what `run.device` means on a machine. Every rank has a GPU of its own, or all compute on the CPU.

    wanted: "auto", "cpu" or "cuda".   num_ranks, num_gpus: of this machine.
    Raises UserError where GPUs are wanted, or there are some, but not one for every rank: nothing falls back in silence.
    """
    if wanted == "cpu":
        return DeviceChoice("cpu", "run.device is cpu")
    if wanted == "auto" and num_gpus == 0:
        return DeviceChoice("cpu", "no GPU was found")
    if num_gpus == 0:
        raise UserError("run.device: cuda, but no GPU was found; give --run.device cpu")
    if num_gpus < num_ranks:
        raise UserError(
            f"run.num_ranks: {num_ranks} ranks cannot have a GPU each, this machine has {num_gpus}; "
            f"give --run.num_ranks {num_gpus} or --run.device cpu"
        )
    return DeviceChoice("cuda", f"{num_ranks} of {num_gpus} GPU(s)")


def init_process_group_from_env(
    device: str | torch.device = "cpu", timeout_seconds: float = 600.0, group_of_one: bool = False
) -> World:
    """Joins the ranks that the environment names (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: torchrun's
    convention). Without RANK this process is a world of one, and no process group is made. gloo serves tensors on the
    CPU; NCCL serves those on a GPU. With a GPU both are set up, and objects travel over gloo.

    group_of_one: a process that is alone gets a group nevertheless; FSDP shards over nothing else.
    """
    device = torch.device(device)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            found = torch.cuda.device_count()
            raise UserError(f"device: cuda for rank {local_rank} of this machine, which has {found} GPU(s); give fewer ranks")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if not group_of_one:
            return World(0, 1, local_rank, device, dist.HashStore(), None)
        store, rank, world_size = dist.HashStore(), 0, 1
    else:
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size, timeout=timeout)
    return World(rank, world_size, local_rank, device, store, dist.group.WORLD, timeout_seconds)


def join_process_group(device: torch.device, timeout_seconds: float = 600.0) -> World:
    """Returns the world of the default process group that somebody else has made (accelerate, torchrun's own program), with a
    group and a part of its store that nobody else uses. Without one this process is a world of its own. Every rank calls it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World(0, 1, 0, device, dist.HashStore(), None)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_seconds))
    names: list[str] = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0, group=group)
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0"))
    store = dist.PrefixStore(names[0], dist.distributed_c10d._get_default_store())  # torch has no public name for it
    return World(rank, world_size, local_rank, device, store, group, timeout_seconds)


def shutdown(world: World) -> None:
    """Leaves the world, together with all other ranks. Drop models, optimizers and work queues first: what still refers to the
    group when the interpreter shuts down makes gloo abort (about 30 % of runs without the barrier and the collection)."""
    if world.group is None:
        return
    dist.barrier(world.group)
    gc.collect()
    dist.destroy_process_group(None if world.group is dist.group.WORLD else world.group)


def read_now(store: dist.Store, key: str) -> bytes:
    """Returns a key's value, or ABSENT, without waiting for it to appear (`get` would)."""
    value: bytes = store.compare_set(key, ABSENT.decode(), ABSENT.decode())
    return value


def gather_objects(world: World, value: Any) -> list[Any]:
    """Returns every rank's value, in the order of ranks, on every rank. Values are pickled: keep them small."""
    if world.group is None:
        return [value]
    values: list[Any] = [None] * world.world_size
    dist.all_gather_object(values, value, group=world.group)
    return values


def any_rank(world: World, is_true: bool) -> bool:
    """Returns whether it is true on any rank, the same answer on all: ranks see a signal at different times and must act on it
    together."""
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
    device = tensors[0].device if tensors else torch.device("cpu")
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

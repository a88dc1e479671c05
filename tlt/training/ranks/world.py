"""This process's rank and device, and the package's collectives, which every rank calls."""

from __future__ import annotations

import gc
import json
import math
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlt.base.types import UserError
from tlt.models.attention import keep_to_steady_kernels
from tlt.training.launch.place import Place, find_place
from tlt.training.ranks.store import (
    Watch,
    attempt_store,
    leave_when_over,
    leave_when_silent,
    meet,
    open_store,
)

TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class World:
    """store: this attempt's part of the c10d Store; a HashStore if this process is alone.
    group: None: this process is alone, and no collective communicates.
    watch: of the threads that end this process if attempt or store is gone; None: no threads.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: dist.Store
    group: dist.ProcessGroup | None
    timeout_seconds: float = math.inf
    watch: Watch | None = None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class DeviceChoice:
    name: str
    reason: str
    num_idle: int = 0


def choose_device(wanted: str, num_ranks: int, num_gpus: int) -> DeviceChoice:
    """UserError if GPUs are wanted or present, but not one for every rank. num_ranks, num_gpus: of this
    machine."""
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
    return DeviceChoice("cuda", f"{num_ranks} of {num_gpus} GPU(s)", num_gpus - num_ranks)


@dataclass(frozen=True)
class Rendezvous:
    """Ranks that have met on a store, without a process group yet. number: the attempt's, from 1."""

    place: Place
    number: int
    store: dist.Store
    watch: Watch

    @property
    def is_restart(self) -> bool:
        return self.place.is_restart or self.number > 1


def meet_ranks(place: Place, timeout_seconds: float) -> Rendezvous:
    if place.world_size == 1:
        return Rendezvous(place, 1, dist.HashStore(), Watch())
    store = open_store(place, timeout_seconds)
    attempt = meet(store, place.rank, place.world_size, timeout_seconds)
    return Rendezvous(place, attempt.number, attempt_store(store, attempt), leave_when_over(store, attempt))


def init_process_group_from_env(
    device: str | torch.device = "cpu",
    timeout_seconds: float = TIMEOUT_SECONDS,
    met: Rendezvous | None = None,
    group_of_one: bool = False,
) -> World:
    """Joins the ranks that the environment names (place.py); without any, a world of one without a process
    group.

    group_of_one: gives a lone process a group, which FSDP needs.
    """
    place = (find_place() or Place(0, 1)) if met is None else met.place
    device = _device_of(place, torch.device(device))
    if place.world_size == 1 and not group_of_one:
        return World(0, 1, place.local_rank, device, dist.HashStore(), None)
    met = met or meet_ranks(place, timeout_seconds)
    rank, world_size = place.rank, place.world_size
    dist.init_process_group(
        _backend(device),
        store=dist.PrefixStore("group", met.store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    if world_size > 1:
        leave_when_silent(met.watch, timeout_seconds, f"{place.master_addr}:{place.master_port}")
    group = dist.group.WORLD
    return World(rank, world_size, place.local_rank, device, met.store, group, timeout_seconds, met.watch)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _device_of(place: Place, device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    index, found = 0 if place.has_own_gpu else place.local_rank, torch.cuda.device_count()
    if index >= found:
        raise UserError(
            f"device: cuda for rank {index} of this machine, which has {found} GPU(s); give fewer ranks"
        )
    torch.cuda.set_device(index)
    keep_to_steady_kernels()
    return torch.device("cuda", index)


def join_process_group(device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS) -> World:
    """The world of the caller's default process group (accelerate's, say), with a group and store of its own.
    A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World(0, 1, 0, device, dist.HashStore(), None)
    group = dist.new_group(backend=_backend(device), timeout=timedelta(seconds=timeout_seconds))
    names: list[str] = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0, group=group)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    default_store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    store = dist.PrefixStore(names[0], default_store)
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device, store, group, timeout_seconds)


def shutdown(world: World) -> None:
    """A collective. Drop models, optimizers and work queues first: objects that refer to the group at the
    interpreter's end make gloo abort."""
    if world.group is None:
        return
    dist.barrier(world.group)
    if world.watch is not None:
        world.watch.has_left.set()
    gc.collect()
    dist.destroy_process_group(None if world.group is dist.group.WORLD else world.group)


def gather_objects(world: World, value: Any) -> list[Any]:
    """By rank. Values are pickled: keep them small."""
    if world.group is None:
        return [value]
    values: list[Any] = [None] * world.world_size
    dist.all_gather_object(values, value, group=world.group)
    return values


def any_rank(world: World, is_true: bool) -> bool:
    """Ranks see a signal at different times and must act on it together."""
    return any(gather_objects(world, is_true))


def broadcast_json(world: World, value: Any) -> Any:
    """The leader's value: files and clocks may differ by rank."""
    return value if world.group is None else json.loads(broadcast_bytes(world, json.dumps(value).encode()))


def broadcast_bytes(world: World, data: bytes) -> bytes:
    if world.group is None:
        return data
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0, group=world.group)
    told = torch.empty(int(size), dtype=torch.uint8)
    if world.is_leader and data:
        told.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if data or size:
        dist.broadcast(told, src=0, group=world.group)
    return told.numpy().tobytes()


def refuse_together(world: World, mistake: str | None) -> None:
    for rank, (message, host) in enumerate(gather_objects(world, (mistake, socket.gethostname()))):
        if message is not None:
            raise UserError(f"rank {rank} on {host}: {message}" if world.group is not None else message)


def average_weighted(world: World, tensors: Sequence[Tensor], weight: float) -> float:
    """Replaces each tensor by sum(weight × tensor) / sum(weight) over the ranks, in place. Returns the total
    weight; at 0 nothing changes.

    A rank of weight 0 adds nothing, not even its NaNs; a rank with all the weight passes its tensors on bit
    for bit.
    """
    assert weight >= 0, f"weight {weight}"
    assert all(tensor.is_floating_point() for tensor in tensors), "not all tensors are floating-point"
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

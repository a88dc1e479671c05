"""The world of ranks: who this process is, where it computes, and the few collectives that the package needs.

Every rank of the world calls each collective, or none does. This file does not know who started the ranks
(launch.py) nor how work is shared out while they generate (work_queue.py).
"""

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

from tlt.launch.place import Place, find_place
from tlt.models.attention import keep_to_steady_kernels
from tlt.ranks.store import Watch, attempt_store, leave_when_over, leave_when_silent, meet, open_store
from tlt.types import UserError

TIMEOUT_SECONDS = 600.0
"""How long ranks wait for each other where nobody says otherwise (run.timeout_seconds)."""


@dataclass(frozen=True)
class World:
    """Says who this process is among the ranks.

    local_rank: its number on this machine.
    device: where it computes.
    store: this attempt's part of the c10d Store (a HashStore when this process is alone).
    group: the default process group, or None when this process is alone: then no collective communicates.
    timeout_seconds: how long a collective waits for the other ranks; infinite when this process is alone.
    watch: who ends this process where the attempt or its store is gone, until `shutdown`; None: nobody does.
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
    """The kind of device that ranks compute on ("cpu" or "cuda"), and why, in a few words for the user.
    num_idle: GPUs that no rank has, though it might."""

    name: str
    reason: str
    num_idle: int = 0


def choose_device(wanted: str, num_ranks: int, num_gpus: int) -> DeviceChoice:
    """Decides what `run.device` means on a machine. Every rank has a GPU of its own, or all compute on the
    CPU.

    wanted: "auto", "cpu" or "cuda".   num_ranks, num_gpus: of this machine.
    Raises UserError where GPUs are wanted, or there are some, but not one for every rank: nothing falls
    back in silence.
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
    return DeviceChoice("cuda", f"{num_ranks} of {num_gpus} GPU(s)", num_gpus - num_ranks)


@dataclass(frozen=True)
class Rendezvous:
    """The ranks of an attempt, who have met on a store and have no process group yet.

    number: of the attempt, from 1 on.  store: this attempt's part of it.
    watch: who ends this process once another attempt begins.
    """

    place: Place
    number: int
    store: dist.Store
    watch: Watch

    @property
    def is_restart(self) -> bool:
        return self.place.is_restart or self.number > 1


def meet_ranks(place: Place, timeout_seconds: float) -> Rendezvous:
    """Waits for all ranks. Raises UserError where some do not come in time."""
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
    """Joins the ranks that the environment names (place.py). Where it names none this process is a world of
    one, and no process group is made. gloo serves tensors on the CPU; NCCL serves those on a GPU. With a GPU
    both are set up, and objects travel over gloo.

    met: the ranks, where they have met already.
    group_of_one: a process that is alone gets a group nevertheless; FSDP shards over nothing else.
    """
    place = (find_place() or Place(0, 1)) if met is None else met.place
    device = _device_of(place, torch.device(device))
    if place.world_size == 1 and not group_of_one:
        return World(0, 1, place.local_rank, device, dist.HashStore(), None)
    met = met or meet_ranks(place, timeout_seconds)
    store = met.store
    timeout = timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    group_store, rank, world_size = dist.PrefixStore("group", store), place.rank, place.world_size
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, timeout=timeout)
    if world_size > 1:
        leave_when_silent(met.watch, timeout_seconds, f"{place.master_addr}:{place.master_port}")
    return World(
        rank, world_size, place.local_rank, device, store, dist.group.WORLD, timeout_seconds, met.watch
    )


def _device_of(place: Place, device: torch.device) -> torch.device:
    """Returns the rank's device; a GPU becomes the current one. Raises UserError where the machine has
    none for it."""
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
    """Returns the world of the default process group that somebody else has made (accelerate, torchrun's
    own program), with a group and a part of its store that nobody else uses. Without one this process is a
    world of its own. Every rank calls it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World(0, 1, 0, device, dist.HashStore(), None)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_seconds))
    names: list[str] = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0, group=group)
    rank, world_size, local_rank = (
        dist.get_rank(),
        dist.get_world_size(),
        int(os.environ.get("LOCAL_RANK", "0")),
    )
    store = dist.PrefixStore(
        names[0], dist.distributed_c10d._get_default_store()
    )  # torch has no public name for it
    return World(rank, world_size, local_rank, device, store, group, timeout_seconds)


def shutdown(world: World) -> None:
    """Leaves the world, together with all other ranks. Drop models, optimizers and work queues first: what
    still refers to the group when the interpreter shuts down makes gloo abort (about 30 % of runs without
    the barrier and the collection)."""
    if world.group is None:
        return
    dist.barrier(world.group)
    if world.watch is not None:
        world.watch.has_left.set()
    gc.collect()
    dist.destroy_process_group(None if world.group is dist.group.WORLD else world.group)


def gather_objects(world: World, value: Any) -> list[Any]:
    """Returns every rank's value, in the order of ranks, on every rank. Values are pickled: keep them
    small."""
    if world.group is None:
        return [value]
    values: list[Any] = [None] * world.world_size
    dist.all_gather_object(values, value, group=world.group)
    return values


def any_rank(world: World, is_true: bool) -> bool:
    """Returns whether it is true on any rank, the same answer on all: ranks see a signal at different
    times and must act on it together."""
    return any(gather_objects(world, is_true))


def broadcast_json(world: World, value: Any) -> Any:
    """Returns the leader's value on every rank: what follows from a file or from a clock is for one rank
    to decide. It travels as JSON."""
    return value if world.group is None else json.loads(broadcast_bytes(world, json.dumps(value).encode()))


def broadcast_bytes(world: World, data: bytes) -> bytes:
    """Returns the leader's bytes on every rank."""
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
    """Raises UserError on all ranks where any has found a mistake: the first one's, with its rank and
    host."""
    found = gather_objects(world, None if mistake is None else (mistake, socket.gethostname()))
    for rank, one in enumerate(found):
        if one is not None:
            message, host = one
            raise UserError(f"rank {rank} on {host}: {message}" if world.group is not None else message)


def average_weighted(world: World, tensors: Sequence[Tensor], weight: float) -> float:
    """Replaces each tensor by sum(weight × tensor) / sum(weight) over the ranks, in place, and returns the
    total weight.

    With a total of 0 nothing changes. A rank of weight 0 contributes nothing, not even its NaNs; a rank
    that has all the weight passes its tensors on bit for bit (weights are normalized first: a factor of
    exactly 1). The tensors travel as one flat bucket on the first one's device, in float64 if any is
    float64 and in float32 otherwise; shapes and order must agree over the ranks. They may lie on several
    devices (AdamW counts its steps on the CPU).
    """
    assert weight >= 0, f"weight {weight}"
    assert all(tensor.is_floating_point() for tensor in tensors), (
        "only floating-point tensors have an average"
    )
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

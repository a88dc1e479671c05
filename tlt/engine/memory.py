"""The memory of an engine's caches, by which it preempts and admits.

cache_bytes() ─▶ budget = max_bytes over [ keys and values │ the drafter's caches ] of every running sequence
                    ├─ has_room:     can the running sequences grow to this length?        no: preempt
                    ├─ fits_longer:  would one more leave room to grow for a while?        no: it waits
                    └─ can_park:     is there room for one that waits for its turn?        no: read it again

Running sequences displace those that wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from tlt.base.types import Request, UserError
from tlt.drafter.protocol import Drafter, NoDrafter
from tlt.engine.parking import Parking
from tlt.models.kv_budget import BLOCK, Budget
from tlt.models.kv_cache import Cache

GPU_SHARE = 0.8
"""Of a GPU's free memory; the rest is for activations, logits, noise and drafter training."""

CPU_SHARE = 0.5
"""Share of a machine's memory for the caches of all its ranks."""


def machine_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """The machine's memory, or the least limit of this process's control groups: a container's, Slurm's,
    systemd's. own: a line each, NUMBER:CONTROLLERS:PATH, without controllers in version 2."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            limit = top / folder / name
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                total = min(total, int(text))
    return total


def automatic_bytes(device: torch.device, num_ranks: int) -> int:
    """GPU_SHARE of what is free, PyTorch's unused reservation included, or a rank's part of CPU_SHARE."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(GPU_SHARE * (torch.cuda.mem_get_info(device)[0] + unused))
    return int(CPU_SHARE * machine_bytes() / num_ranks)


class CacheMemory:
    """The caches of an engine and its drafter, within one budget.

    cache_bytes: returns the most bytes of all caches, None: no bound. Called whenever they start empty.
    """

    def __init__(self, cache: Cache, window: int, cache_bytes: Callable[[], int | None]) -> None:
        self.cache, self.window = cache, window
        self.drafter: Drafter[Any] = NoDrafter()
        self.parking = Parking()
        self._cache_bytes = cache_bytes
        self._budget: Budget | None = None

    @property
    def budget(self) -> Budget:
        if self._budget is None:
            self._budget = Budget(self._cache_bytes(), self.slot_bytes)
        return self._budget

    def slot_bytes(self, length: int) -> int:
        """Of all caches, with room for `length` tokens."""
        return self.cache.slot_bytes(length) + self.drafter.slot_bytes(length)

    def has_room(self, num_slots: int, length: int) -> bool:
        return self.cache.holds(num_slots, length) or self._make_room(num_slots, length)

    def fits_longer(self, num_slots: int, length: int) -> bool:
        """Without room to grow, a new sequence would soon be preempted."""
        return self._make_room(num_slots, self._longer(length))

    def _make_room(self, num_slots: int, length: int) -> bool:
        if not self.budget.fits(num_slots, length):
            return False
        while not self._beside_parked.fits(num_slots, length):
            self.parking.forget_oldest()
        return True

    @property
    def _beside_parked(self) -> Budget:
        most = self.budget.max_bytes
        return Budget(None if most is None else most - self.parking.num_bytes, self.slot_bytes)

    def can_park(self, length: int) -> bool:
        bytes_of_slots = self.cache.num_slots * self.slot_bytes(self.cache.capacity)
        left = self._beside_parked.max_bytes
        return left is None or bytes_of_slots + self.slot_bytes(length) <= left

    def max_slots(self, length: int) -> int:
        return self.budget.max_slots(self._longer(length))

    def _longer(self, length: int) -> int:
        return min(length + max(length // 8, BLOCK), self.window)

    def reserve(self, num_slots: int, length: int) -> None:
        if not self.cache.holds(num_slots, length):
            self._make_room(num_slots, length)
            self.cache.reserve(num_slots, length, self._beside_parked)
            self.drafter.reserve(self.cache.num_slots, self.cache.capacity)

    def release(self) -> None:
        """Nothing may be running."""
        self.parking.clear()
        self.cache.release()
        self.drafter.release()
        self._budget = None

    def check(self, request: Request) -> None:
        """Raises UserError for a request whose longest response would not fit alone."""
        budget, length = self.budget, min(len(request.prompt_ids) + request.params.max_tokens, self.window)
        if budget.max_bytes is None or budget.fits(1, length):
            return
        has, needs = budget.max_bytes / 2**30, self.slot_bytes(length) / 2**30
        raise UserError(
            f"kv_gib: {has:.3g} GiB hold {budget.max_length(1)} tokens of one sequence, but problem "
            f"{request.problem_id!r} with its response may have {length}; give kv_gib at least "
            f"{needs + 5e-4:.3f}, or lower max_tokens"
        )

"""Carries the tensors of a weight update to vLLM's workers.

direct    a worker in this process               the tensors as they are
host      worker processes                       a safetensors file in shared memory; digests are compared
ipc       one worker process, on the same GPU    vLLM's weight transfer: the worker reads our GPU memory
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tlt.base.config.vllm import VllmSection
from tlt.base.io.text import one_line
from tlt.base.types import UserError
from tlt.models.hf.weights import content_hash

Way = Literal["direct", "host", "ipc"]


def choose_way(section: VllmSection, *, is_cuda: bool, has_own_worker: bool) -> Way:
    """Raises UserError for an impossible `ipc`. has_own_worker: workers are processes."""
    size, obstacle = section.tensor_parallel, None
    if not is_cuda:
        obstacle = "hands over memory of a GPU, and vLLM computes on a CPU here; give auto"
    elif size > 1:
        gpus = f"each of {size} workers reads memory of its own GPU, and the policy lies on one"
        obstacle = f"{gpus}; give auto"
    elif not has_own_worker:
        obstacle = "vLLM's worker is in this process and takes tensors as they are; give auto"
    if section.transfer == "ipc" and obstacle is not None:
        raise UserError(f"vllm.transfer: ipc: {obstacle}")
    if not has_own_worker:
        return "direct"
    return "ipc" if section.transfer != "host" and obstacle is None else "host"


class WorkerCall(Protocol):
    def __call__(self, name: str, *arguments: Any) -> list[Any]: ...


class Carrier(Protocol):
    """Parts are tensors by Hugging Face names."""

    def begin(self, is_drafter: bool) -> None: ...

    def carry(self, is_drafter: bool, part: Mapping[str, Tensor]) -> None: ...

    def end(self, is_drafter: bool) -> None: ...


class Direct:
    def __init__(self, call: WorkerCall) -> None:
        self.call = call

    def begin(self, is_drafter: bool) -> None:
        self.call("tlt_begin", is_drafter)

    def carry(self, is_drafter: bool, part: Mapping[str, Tensor]) -> None:
        self.call("tlt_part", is_drafter, part)

    def end(self, is_drafter: bool) -> None:
        self.call("tlt_end", is_drafter)


_SHARED = "/dev/shm"
"""Memory. A container's has 64 MB unless it is told otherwise."""


def _has_room(folder: str, num_bytes: int) -> bool:
    return os.access(folder, os.W_OK | os.X_OK) and shutil.disk_usage(folder).free > num_bytes + (1 << 20)


class ThroughHost(Direct):
    def carry(self, is_drafter: bool, part: Mapping[str, Tensor]) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in part.items()}
        folder = _SHARED if _has_room(_SHARED, sum(tensor.nbytes for tensor in tensors.values())) else None
        with tempfile.NamedTemporaryFile(dir=folder, prefix="tlt-", suffix=".safetensors") as file:
            save_file(tensors, file.name)
            arrived = self.call("tlt_part", is_drafter, file.name)
        if any(found != content_hash(tensors) for found in arrived):
            raise RuntimeError("vllm: weights have arrived damaged in a worker")


class SharedGpu:
    """vLLM's one worker reads this process's GPU memory (CUDA IPC): copies, kept until the call returns, or
    until the update ends where vLLM has buffered some for an incomplete layer."""

    def __init__(self, call: WorkerCall, device: torch.device) -> None:
        self.call, self.device = call, device
        self._uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._kept: list[Mapping[str, Tensor]] = []
        self.call("init_weight_transfer_engine", {"packed": False})
        self._check()

    def begin(self, is_drafter: bool) -> None:
        self.call("start_draft_weight_update" if is_drafter else "start_weight_update")

    def carry(self, is_drafter: bool, part: Mapping[str, Tensor]) -> None:
        copies = {
            name: tensor.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
            for name, tensor in part.items()
        }
        (is_buffered,) = self.call("tlt_shared_part", self._shared(copies))
        if is_buffered:
            self._kept.append(copies)

    def end(self, is_drafter: bool) -> None:
        self.call("tlt_end_shared")
        self._kept.clear()
        torch.cuda.ipc_collect()

    def _shared(self, copies: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            "names": list(copies),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in copies.values()],
            "shapes": [list(tensor.shape) for tensor in copies.values()],
            "ipc_handles": [{self._uuid: reduce_tensor(tensor)[1]} for tensor in copies.values()],
        }

    def _check(self) -> None:
        """Raises UserError: some machines and containers forbid it."""
        copies = {"tried": torch.arange(1 << 12, device=self.device)}
        try:
            arrived = self.call("tlt_try_shared", self._shared(copies))
        except RuntimeError as error:
            said = one_line(error, 300)
            raise UserError(f"vllm.transfer: ipc does not work here ({said}); give host") from error
        if arrived != [content_hash(copies)]:
            said = "other values arrive than were sent"
            raise UserError(f"vllm.transfer: ipc does not work here ({said}); give host")


def make_carrier(way: Way, call: WorkerCall, device: torch.device) -> Carrier:
    if way == "ipc":
        return SharedGpu(call, device)
    return Direct(call) if way == "direct" else ThroughHost(call)

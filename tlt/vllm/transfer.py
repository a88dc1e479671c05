"""How the tensors of an update reach vLLM's workers.

    direct    the worker in this process                the tensors as they are
    host      worker processes                          a safetensors file in shared memory; digests are compared
    ipc       one worker process, on this one's GPU     vLLM's own weight transfer: the worker reads this process's GPU memory

Between separate GPUs vLLM has a transfer, too (nccl). TLT has no such layout: a rank's vLLM computes on
the rank's own GPU. Knows neither policies nor when they change.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tlt.config.vllm import VllmSection
from tlt.io.text import one_line
from tlt.types import UserError
from tlt.vllm.inside.digest import digest

Way = Literal["direct", "host", "ipc"]


def choose_way(section: VllmSection, *, is_cuda: bool, has_own_worker: bool) -> Way:
    """Returns how tensors go. UserError where `ipc` is asked for and cannot be. has_own_worker: whether
    vLLM's worker, or each of several, is a process of its own."""
    obstacles = (
        (not is_cuda, "hands over memory of a GPU, and vLLM computes on a CPU here; give auto"),
        (
            section.tensor_parallel > 1,
            f"each of {section.tensor_parallel} workers reads memory of its own GPU, and the policy lies on "
            "one; give auto",
        ),
        (
            not has_own_worker,
            "vLLM's worker is in this process and takes tensors as they are; give auto, or own_process true",
        ),
    )
    found = [because for is_met, because in obstacles if is_met]
    if section.transfer == "ipc" and found:
        raise UserError(f"vllm.transfer: ipc: {found[0]}")
    if not has_own_worker:
        return "direct"
    return "host" if section.transfer == "host" or found else "ipc"


class Call(Protocol):
    """Calls a method of every worker; returns what each returned."""

    def __call__(self, name: str, *arguments: Any) -> list[Any]: ...


class Carrier(Protocol):
    """Carries the parts of an update, tensors by Hugging Face names, of the policy or of the drafter."""

    def begin(self, is_drafter: bool) -> None: ...

    def carry(self, is_drafter: bool, part: Mapping[str, Tensor]) -> None: ...

    def end(self, is_drafter: bool) -> None: ...


class Direct:
    """Hands tensors over as they are."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def begin(self, is_drafter: bool) -> None:
        self.call("tlt_begin", is_drafter)

    def carry(self, is_drafter: bool, part: Mapping[str, Tensor]) -> None:
        self.call("tlt_part", is_drafter, part)

    def end(self, is_drafter: bool) -> None:
        self.call("tlt_end", is_drafter)


class ThroughHost(Direct):
    """Hands a part over through a file in shared memory, and compares the digests of what has arrived."""

    def carry(self, is_drafter: bool, part: Mapping[str, Tensor]) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in part.items()}
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.NamedTemporaryFile(dir=folder, prefix="tlt-", suffix=".safetensors") as file:
            save_file(tensors, file.name)
            arrived = self.call("tlt_part", is_drafter, file.name)
        if any(found != digest(tensors) for found in arrived):
            raise RuntimeError("vllm: weights have arrived damaged in a worker")


class SharedGpu:
    """Lets vLLM's one worker read the tensors in the memory of the GPU that it shares with this process (CUDA
    IPC).

    What is shared is a copy that nobody writes to. It is kept while vLLM may read it: until the call
    returns, or until the update ends where vLLM has put some of the part by, as it does with a layer that
    is not whole yet.
    """

    def __init__(self, call: Call, device: torch.device) -> None:
        self.call, self.device = call, device
        self._uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._kept: list[list[Tensor]] = []
        self.call("init_weight_transfer_engine", {"packed": False})
        self._try()

    def begin(self, is_drafter: bool) -> None:
        self.call("start_draft_weight_update" if is_drafter else "start_weight_update")

    def carry(self, is_drafter: bool, part: Mapping[str, Tensor]) -> None:
        copies = self._copies(part)
        (is_put_by,) = self.call("tlt_shared_part", self._shared(copies))
        if is_put_by:
            self._kept.append(list(copies.values()))

    def end(self, is_drafter: bool) -> None:
        self.call("tlt_end_shared")
        self._kept.clear()
        torch.cuda.ipc_collect()

    def _copies(self, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
        as_one = torch.contiguous_format
        return {
            name: tensor.detach().to(self.device, copy=True, memory_format=as_one)
            for name, tensor in part.items()
        }

    def _shared(self, copies: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns what vLLM's transfer takes for an update: numbers and bytes, which it sends as it sends
        any call."""
        return {
            "names": list(copies),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in copies.values()],
            "shapes": [list(tensor.shape) for tensor in copies.values()],
            "ipc_handles": [{self._uuid: reduce_tensor(tensor)[1]} for tensor in copies.values()],
        }

    def _try(self) -> None:
        """Sees once, before it matters, that the worker reads what lies here: not every machine and
        container lets it."""
        copies = {"tried": torch.arange(1 << 12, device=self.device)}
        try:
            arrived = self.call("tlt_try_shared", self._shared(copies))
        except RuntimeError as error:
            raise UserError(
                f"vllm.transfer: ipc does not work here ({one_line(error, 300)}); give host"
            ) from error
        if arrived != [digest(copies)]:
            raise UserError(
                "vllm.transfer: ipc does not work here (other values arrive than were sent); give host"
            )


def make_carrier(way: Way, call: Call, device: torch.device) -> Carrier:
    """Returns what carries tensors this way. device: this process's own."""
    if way == "ipc":
        return SharedGpu(call, device)
    return Direct(call) if way == "direct" else ThroughHost(call)

"""How the tensors of an update reach vLLM's workers.

    direct    the worker in this process      the tensors as they are
    host      worker processes                a safetensors file in shared memory, which each reads; digests are compared

Knows neither policies nor when they change.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any, Protocol

from safetensors.torch import save_file
from torch import Tensor


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
        from tlt.vllm.inside.worker import digest

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in part.items()}
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.NamedTemporaryFile(dir=folder, prefix="tlt-", suffix=".safetensors") as file:
            save_file(tensors, file.name)
            arrived = self.call("tlt_part", is_drafter, file.name)
        if any(found != digest(tensors) for found in arrived):
            raise RuntimeError("vllm: weights have arrived damaged in a worker")

"""A GPU whose memory two processes share, pretended: what of CUDA lies between vLLM's weight transfer and the
tensors.

Its memory is files. What a sender lets go of is overwritten at once, as a GPU's allocator may do: whoever
reads it later reads NaN. Everything else, vLLM's transfer and our sending, is the real one.
"""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

UUID = "GPU-pretended"


def properties(_: Any) -> SimpleNamespace:
    """Stands for torch.cuda.get_device_properties."""
    return SimpleNamespace(uuid=UUID)


class Memory:
    """The sender's end, with what is shared at the moment. num_shared: tensors so far."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_shared, self.shared = folder, 0, set[Path]()

    def reduce_tensor(self, tensor: Tensor) -> tuple[None, tuple[Any, ...]]:
        """Stands for torch's function of this name: arguments as rebuild_cuda_tensor takes them, the file
        as the handle."""
        assert tensor.is_contiguous()
        assert tensor.storage_offset() == 0
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self.num_shared += 1
        self.shared.add(path := Path(file.name))
        weakref.finalize(tensor, self._reuse, path)
        num_bytes, storage = tensor.nbytes, type(tensor._typed_storage())
        shape = (type(tensor), tensor.size(), tensor.stride(), 0, storage, tensor.dtype, 5)
        return None, (*shape, str(path).encode(), num_bytes, 0, False, b"counter", 0, b"event", True)

    def _reuse(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.write(b"\xff" * path.stat().st_size)
        self.shared.discard(path)


def rebuild_cuda_tensor(*given: Any) -> Tensor:
    """Stands for torch's function of this name: a view of the sender's memory, and no copy."""
    _, size, stride, offset, _, dtype, device, handle, num_bytes, *_ = given
    assert device is None, "the receiver's own device, which has no number on a CPU"
    storage = torch.UntypedStorage.from_file(handle.decode(), shared=True, nbytes=num_bytes)
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)

"""Our worker in a process that is given the pretended GPU. Whoever imports this has it."""

from __future__ import annotations

import torch
from vllm.distributed.weight_transfer import ipc_engine

from tests.vllm import pretend_gpu
from tlt.engine.vllm.inside.worker import TltWorker

ipc_engine.rebuild_cuda_tensor = pretend_gpu.rebuild_cuda_tensor
torch.cuda.get_device_properties = pretend_gpu.properties  # type: ignore[assignment]  # the uuid is all that is asked for
torch.accelerator.synchronize = lambda: None  # type: ignore[assignment]  # there is nothing to wait for


class PretendGpuWorker(TltWorker):
    """Adds who received."""

    def tlt_receiver(self) -> str:
        return type(self.weight_transfer_engine).__name__

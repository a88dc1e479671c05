"""A policy sharded over the ranks (FSDP2), and gathered again one tensor at a time.

    checkpoint ─ fill: this rank's rows ─▶ [slice] [slice] [slice] ─ full tensors, layer by layer ─▶ engine
                                             every layer is gathered for its forward and backward alone

A slice: this rank's rows (dimension 0) of a parameter, as torch.chunk cuts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tlt.models.decoder import Policy
from tlt.models.lora import adapted, is_of_adapter
from tlt.training.ranks.world import World

Rows = Callable[[str, slice], Tensor]
"""(tensor's name, rows) ─▶ these rows of it."""


@dataclass(frozen=True)
class LayoutChoice:
    name: str
    reason: str

    @property
    def is_sharded(self) -> bool:
        return self.name == "fsdp"


def choose_layout(wanted: str, num_ranks: int, device: str) -> LayoutChoice:
    if wanted != "auto":
        return LayoutChoice(wanted, f"parallel.policy is {wanted}")
    if num_ranks == 1:
        return LayoutChoice("replicate", "one rank")
    if device == "cpu":
        return LayoutChoice("replicate", "ranks on CPUs")
    return LayoutChoice("fsdp", f"{num_ranks} ranks on GPUs")


def mesh_of(world: World) -> DeviceMesh:
    assert world.group is not None, "slices need a process group, be it of one rank"
    return DeviceMesh.from_group(world.group, world.device.type)


def shard(model: Policy, mesh: DeviceMesh, param_dtype: torch.dtype | None = None) -> None:
    """In place. Gradients are sums over the ranks, not means.

    param_dtype: dtype in which layers are gathered and computed; None: the slices'. Slices and sums of
        gradients keep theirs.
    """
    trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    precision = MixedPrecisionPolicy(param_dtype, reduce_dtype=trained.dtype)
    for module in (*model.layers, model):
        # The root too: a forward without a backward would leave it gathered, and stale after the next step.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # otherwise PREMUL_SUM, which gloo does not have


@torch.no_grad()
def fill(model: Policy, rows: Rows) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(rows(name, local_rows(tensor)))
        else:  # a buffer, such as a router's correction
            tensor.copy_(rows(name, slice(None)))


def local_rows(tensor: DTensor) -> slice:
    mesh, num_rows = tensor.device_mesh, tensor.shape[0]
    size = -(-num_rows // mesh.size())
    start = min(mesh.get_local_rank() * size, num_rows)
    rows = slice(start, min(start + size, num_rows))
    assert rows.stop - rows.start == tensor.to_local().shape[0]
    return rows


# ── gathered again ──────────────────────────────────────────────────────────────────────────────────────────


class FullTensors(Mapping[str, Tensor]):
    """Reading a sharded tensor is a collective: all ranks read in the same order. Adapters are merged into
    their matrices.

    dtype: None: not cast.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype | None = None) -> None:
        stored = policy.state_dict(keep_vars=True)
        self._tensors = {name: tensor for name, tensor in stored.items() if not is_of_adapter(name)}
        self._adapted, self._dtype = adapted(policy), dtype

    def __getitem__(self, name: str) -> Tensor:
        if name in self._adapted:
            # of full matrices, so that the number of ranks changes no bit
            merged = self._adapted[name].merged(full_tensor)
            return merged if self._dtype is None else merged.to(self._dtype)
        return full_tensor(self._tensors[name], self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def full_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Slices are cast before they travel. An unsharded tensor is returned itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    cast = tensor.detach().to(dtype or tensor.dtype)
    assert isinstance(cast, DTensor)
    return cast.full_tensor()

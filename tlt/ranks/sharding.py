"""A policy in slices over the ranks (FSDP2): cut, filled, and made whole again one tensor at a time.

    checkpoint ─ fill: the rows of this rank ─▶ [slice] [slice] [slice] ─ whole, layer by layer ─▶ engine, files
                                                   every layer gathered for its forward and its backward alone

A slice is the rank's part of the rows (dimension 0) of every parameter, as torch.chunk cuts them. This
file knows neither optimizer nor engine; the mesh is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tlt.models.decoder import Transformer
from tlt.models.lora import adapted, is_of_adapter
from tlt.ranks.world import World

Rows = Callable[[str, slice], Tensor]
"""Maps (a tensor's name, rows) to these rows of it."""


@dataclass(frozen=True)
class LayoutChoice:
    """How the policy lies on the ranks, "replicate" or "fsdp", and why, in a few words for the user."""

    name: str
    reason: str

    @property
    def is_sharded(self) -> bool:
        return self.name == "fsdp"


def choose_layout(wanted: str, num_ranks: int, device: str) -> LayoutChoice:
    """Decides what `parallel.policy` means. wanted: "auto", "replicate" or "fsdp".
    num_ranks: of all machines."""
    if wanted != "auto":
        return LayoutChoice(wanted, f"parallel.policy is {wanted}")
    if num_ranks == 1:
        return LayoutChoice("replicate", "one rank")
    if device == "cpu":
        return LayoutChoice("replicate", "ranks on CPUs")
    return LayoutChoice("fsdp", f"{num_ranks} ranks on GPUs")


def mesh_of(world: World) -> DeviceMesh:
    """Returns all ranks of the world as a mesh of one dimension."""
    assert world.group is not None, "slices need a process group, be it of one rank"
    return DeviceMesh.from_group(world.group, world.device.type)


def shard(model: Transformer, mesh: DeviceMesh, param_dtype: torch.dtype | None = None) -> None:
    """Cuts the model, in place: its layers one by one, and what is left. Gradients are sums over the ranks,
    not means.

    param_dtype: in which layers are gathered and computed; the slices keep their type, and gradients are
        added up in it. None: theirs.
    """
    trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    precision = MixedPrecisionPolicy(param_dtype, reduce_dtype=trained.dtype)
    for module in (*model.model.layers, model):
        # The root as well: gathered by a forward without a backward, it would stay as it was before the
        # optimizer's next step.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # otherwise PREMUL_SUM, which gloo does not have


@torch.no_grad()
def fill(model: Transformer, rows: Rows) -> None:
    """Copies this rank's rows of every parameter in."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        local = parameter.to_local()
        local.copy_(rows(name, local_rows(parameter)))


def local_rows(tensor: DTensor) -> slice:
    """Returns the rows that this rank has of a tensor cut over a mesh of one dimension."""
    mesh, num_rows = tensor.device_mesh, tensor.shape[0]
    size = -(-num_rows // mesh.size())
    start = min(mesh.get_local_rank() * size, num_rows)
    rows = slice(start, min(start + size, num_rows))
    assert rows.stop - rows.start == tensor.to_local().shape[0]
    return rows


# ── whole again ─────────────────────────────────────────────────────────────────────────────────────────────


class FullTensors(Mapping[str, Tensor]):
    """The tensors of a policy by name, whole, as `dtype` (None: as they are), one at a time.

    To read a sharded one is a collective: all ranks read the same ones in the same order. One that is not
    sharded is given where it lies, in its own type. An adapter is no tensor of its own: the matrix that it
    adapts has it in it.
    """

    def __init__(self, policy: Transformer, dtype: torch.dtype | None = None) -> None:
        self._parameters = {name: p for name, p in policy.named_parameters() if not is_of_adapter(name)}
        self._adapted, self._dtype = adapted(policy), dtype

    def __getitem__(self, name: str) -> Tensor:
        if name in self._adapted:
            merged = self._adapted[name].merged(
                full_tensor
            )  # of whole matrices, so that the number of ranks changes no bit
            return merged if self._dtype is None else merged.to(self._dtype)
        return full_tensor(self._parameters[name], self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def full_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a sharded tensor from the slices of all ranks, which are cast before they travel; any other
    as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    cast = tensor.detach().to(dtype or tensor.dtype)
    assert isinstance(cast, DTensor)
    return cast.full_tensor()


def layer_by_layer(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yields the tensors in parts, each layer's together. Nothing is read before its part is asked for,
    nor kept afterwards."""
    for _, names in groupby(
        tensors, lambda name: name.split(".")[:3] if name.startswith("model.layers.") else name
    ):
        yield {name: tensors[name] for name in names}

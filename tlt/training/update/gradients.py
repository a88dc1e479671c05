"""The gradients of one optimizer step, added up over micro-batches and ranks.

Replicated   backward, backward, … into one flat bucket ─▶ one all-reduce    all gradients on every rank
Sharded      backward ─▶ reduce-scatter, backward ─▶ reduce-scatter, …       a rank has its slices alone
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Gradients(Protocol):
    """with collect(): backward, backward, …, reduce, norm, scale, step. On every rank."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None: a single rank."""
        ...

    @property
    def needs_equal_shares(self) -> bool:
        """A pass is a collective: all ranks must run equally many."""
        ...

    def collect(self) -> AbstractContextManager[None]: ...

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """is_last: of the micro-batches before `reduce`."""
        ...

    def reduce(self) -> None: ...

    def norm(self) -> float: ...

    def scale(self, factor: float) -> None: ...


def gradients_of(model: nn.Module, group: dist.ProcessGroup | None, reduces_each: bool = True) -> Gradients:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if isinstance(model, FSDPModule):
        assert group is not None
        return Sharded(model, parameters, group, reduces_each)
    return Replicated(parameters, group)


class Replicated:
    """Gradients are views of one bucket, in the parameters' order."""

    needs_equal_shares = False

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self.parameters, self.group = parameters, group
        self._bucket = torch.empty(0)

    @contextmanager
    def collect(self) -> Iterator[None]:
        sizes = [p.numel() for p in self.parameters]
        first = self.parameters[0]
        self._bucket = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        try:
            for parameter, part in zip(self.parameters, self._bucket.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            yield
        finally:
            self._bucket = torch.empty(0)
            for parameter in self.parameters:
                parameter.grad = None

    def backward(self, loss: Tensor, is_last: bool) -> None:
        loss.backward()

    def reduce(self) -> None:
        if self.group is not None:
            dist.all_reduce(self._bucket, op=dist.ReduceOp.SUM, group=self.group)

    def norm(self) -> float:
        return float(torch.linalg.vector_norm(self._bucket))

    def scale(self, factor: float) -> None:
        self._bucket.mul_(factor)


class Sharded:
    """Every rank holds slices (ranks/sharding.py), and FSDP reduces within the backward pass.

    reduces_each: after every micro-batch: a rank holds whole gradients of one layer at most. Else with the
        last: less traffic, and sums in the order of the replicated update.
    """

    needs_equal_shares = True

    def __init__(
        self,
        model: FSDPModule,
        parameters: Sequence[Tensor],
        group: dist.ProcessGroup,
        reduces_each: bool = True,
    ) -> None:
        self.model, self.parameters, self.group, self.reduces_each = model, parameters, group, reduces_each

    @contextmanager
    def collect(self) -> Iterator[None]:
        try:
            yield
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self.model.set_requires_gradient_sync(self.reduces_each or is_last)
        loss.backward()

    def reduce(self) -> None:
        """The optimizer would skip parameters without a gradient."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def norm(self) -> float:
        """In float64, parameter by parameter, so that the slicing does not show."""
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in self._local()]
        squares = torch.stack([norm.square() for norm in norms])
        dist.all_reduce(squares, group=self.group)
        return math.sqrt(float(squares.sum()))

    def scale(self, factor: float) -> None:
        for part in self._local():
            part.mul_(factor)

    def _local(self) -> Iterator[Tensor]:
        for parameter in self.parameters:
            assert isinstance(parameter.grad, DTensor)
            yield parameter.grad.to_local()

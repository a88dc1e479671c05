"""transformers' modules with equal rows, on CPUs: a row's bits do not depend on the rows computed with it.

products with weights    compiled loops, by `Matrix`
attention                compiled loops, as in any.py
silu, gelu, sigmoid      made of exp and tanh: PyTorch's own round a tensor's last numbers otherwise
the rest                 PyTorch's, alike in any company
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import GELUTanh, SiLUActivation

from tlt.models.loops import available
from tlt.models.routing import routers_of

WITH_SIGMOIDS = frozenset(("glm4_moe", "gpt_oss", "llama4_text"))
"""Families whose routers or experts call sigmoid."""


class Matrix:
    """A frozen weight in panels, where a module looks for its parameter: [O, I], or, of experts, [X, O,
    I]."""

    device = torch.device("cpu")

    def __init__(self, like: Tensor, is_transposed: bool = False) -> None:
        """is_transposed: whether the module keeps [X, I, O]."""
        self.shape, self.dtype, self.is_transposed = like.shape, like.dtype, is_transposed
        loops = available.load()
        assert loops is not None, "check_equal_rows refuses"
        *experts, num_out, num_in = like.mT.shape if is_transposed else like.shape
        make = loops.experts.ExpertPanels if experts else loops.products.Panels
        self.panels = make(*experts, num_in, num_out, like.dtype)

    def copy_(self, given: Tensor) -> None:
        self.panels.load(given.mT if self.is_transposed else given)

    def transpose(self, *dims: int) -> Matrix:
        """`grouped_mm` wants [X, I, O]."""
        assert not self.is_transposed
        return self

    def type(self, dtype: torch.dtype) -> Matrix:
        assert dtype == self.dtype
        return self

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        found: Tensor = self.panels.multiply(x.reshape(-1, x.shape[-1]), bias)
        return found.view(*x.shape[:-1], -1)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        x, matrix, *bias = args
        if func is F.linear:
            found: Tensor = matrix.multiply(x, *bias, **(kwargs or {}))
        elif func is torch._grouped_mm:
            found = matrix.panels.multiply(x, kwargs["offs"].long())
        else:
            assert func is torch.bmm, f"{func} of a weight {list(matrix.shape)} has no equal rows"
            ends_X = torch.arange(1, len(x) + 1) * x.shape[1]
            found = matrix.panels.multiply(x.flatten(0, 1), ends_X).view(*x.shape[:-1], -1)
        return found


def put_matrices(model: nn.Module, family: str, head: nn.Module | None) -> dict[str, Matrix]:
    """Replaces activations and the weights of all products but the head's. Returns the weights by parameter
    name."""
    routers = {id(router) for router in routers_of([model])}
    matrices: dict[str, Matrix] = {}
    for path, module in model.named_modules():
        if type(module) in ACTIVATIONS:
            module.forward = ACTIVATIONS[type(module)]
        if isinstance(module, nn.Embedding) or module is head:
            continue
        for name, weight in [*module.named_parameters(recurse=False)]:
            if weight.dim() > 1 and "bias" not in name:
                is_transposed = weight.dim() == 3 and getattr(module, "is_transposed", True)
                matrix = matrices[f"{path}.{name}"] = Matrix(weight, is_transposed)
                delattr(module, name)
                setattr(module, name, matrix)
        if family in WITH_SIGMOIDS and (id(module) in routers or hasattr(module, "_apply_gate")):
            module.forward = _with_own_sigmoid(module.forward)
    return matrices


def silu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide / ((-wide).exp() + 1)).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    return (1 / ((-x.float()).exp() + 1)).to(x.dtype)


def gelu_of_tanh(x: Tensor) -> Tensor:
    wide = x.float()
    inner = (wide + wide * wide * wide * 0.044715) * math.sqrt(2 / math.pi)
    return (wide * 0.5 * (inner.tanh() + 1)).to(x.dtype)


ACTIVATIONS: dict[type[nn.Module], Any] = {SiLUActivation: silu, nn.SiLU: silu, GELUTanh: gelu_of_tanh}


class _OwnSigmoid(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.sigmoid, Tensor.sigmoid, F.sigmoid):
            return sigmoid(*args)
        return func(*args, **(kwargs or {}))


def _with_own_sigmoid(forward: Any) -> Any:
    def with_own_sigmoid(*args: Any, **kwargs: Any) -> Any:
        with _OwnSigmoid():
            return forward(*args, **kwargs)

    return with_own_sigmoid

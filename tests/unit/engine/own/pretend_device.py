"""A pretended GPU: tensors on `cuda` whose values are in host memory. It counts copies and synchronizations.

    with pretended(monkeypatch) as crossings:      # every tensor made on "cuda" in here is one of these
        ...
    crossings.down      number of times that the host waited for values of the device (synchronizations)
    crossings.up        number of times that the host sent values to the device
    crossings.stalls    those of `up` that are not `non_blocking`: PyTorch then synchronizes the stream

Each is counted by place in the code. Operations on tensors of both devices raise, as on a GPU. A
`non_blocking` copy to the host is not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import tlt
from tests.replays import record_by_running
from tlt.models import graphs
from tlt.speculation.law import draw as draw_module
from tlt.speculation.law import sampling
from tlt.speculation.law.params import Law

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_ROOT = f"{Path(tlt.__file__).parent}/"
_WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero")
"""Operations whose result, or its shape, the host waits for."""


@dataclass
class Crossings:
    """Counts by "file:line", of the innermost line of the package that asked for it."""

    down: Counter[str] = field(default_factory=Counter)
    up: Counter[str] = field(default_factory=Counter)
    stalls: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        self.down.clear()
        self.up.clear()
        self.stalls.clear()

    def send(self, waits: bool) -> None:
        self.up[_place()] += 1
        if waits:
            self.stalls[_place()] += 1


_crossings = Crossings()


class PretendTensor(Tensor):
    """Wraps `values`, which lie in host memory."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> PretendTensor:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # torch's way to make a wrapper
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device="meta",
        )
        made.values = values
        return made  # type: ignore[no-any-return]  # torch's function has no types

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents it

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute in torch
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]  # an attribute in torch
        return True

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PretendTensor({self.values})"

    def tolist(self) -> Any:
        _crossings.down[_place()] += 1
        return self.values.tolist()


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    pretended = [value for value in flat if isinstance(value, PretendTensor)]
    own = [
        value
        for value in flat
        if isinstance(value, Tensor) and not isinstance(value, PretendTensor) and value.dim()
    ]
    name, wanted = str(func), kwargs.get("device")
    is_copy = name.startswith(("aten.copy_", "aten._to_copy"))
    if pretended and name.startswith(_WAITS):
        _crossings.down[_place()] += 1
    if pretended and own and name.startswith(("aten.index.", "aten.index_put")):
        _crossings.send(waits=True)  # places given as a list: torch sends them
    elif pretended and own and not is_copy:
        raise RuntimeError(f"{name} mixes tensors of the CPU and of a GPU at {_place()}")
    if name.startswith("aten.copy_") and len(pretended) == 1:
        if isinstance(args[0], PretendTensor):
            _crossings.send(waits=not (kwargs.get("non_blocking") or args[2:3] == (True,)))
        else:
            _crossings.down[_place()] += 1
    args, kwargs = tree_unflatten([_values(value) for value in flat], spec)
    if wanted is not None:
        kwargs["device"] = _CPU
    result = func(*args, **kwargs)
    if not pretended and (wanted is None or torch.device(wanted).type == "cpu"):
        return result
    known = {id(value.values): value for value in pretended}  # what works in place returns what it was given
    return tree_map(lambda out: _wrapped(out, known) if isinstance(out, Tensor) else out, result)


def _wrapped(values: Tensor, known: dict[int, PretendTensor]) -> PretendTensor:
    if id(values) in known:
        return known[id(values)]
    with torch.inference_mode(False):  # torch makes no view of a normal tensor out of an inference tensor
        return PretendTensor(values)


def _values(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.values
    return _CPU if isinstance(value, torch.device) else value


def _place() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None and (
        not frame.f_code.co_filename.startswith(_ROOT) or frame.f_code.co_filename == f"{_ROOT}uploads.py"
    ):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename.removeprefix(_ROOT)}:{frame.f_lineno}"


def kernels() -> SimpleNamespace:
    """Stands in for fused.py: what the kernels of a GPU compute, by the reference on the CPU."""

    def gumbel_noise(keys_B4: Tensor, positions_BT: Tensor, vocab_size: int) -> Tensor:
        return PretendTensor(sampling.gumbel_noise(plain(keys_B4), plain(positions_BT), vocab_size))

    def draw(logits_RV: Tensor, law: Law) -> tuple[Tensor, ...]:
        assert law.params.inverse_temperature_B11 is None
        assert law.params.noise_scale_B11 is None
        law = Law(plain(law.keys_R4), plain(law.positions_R), law.params)
        drawn = draw_module.draw_by_definition(plain(logits_RV), law)
        return tuple(map(PretendTensor, drawn))

    return SimpleNamespace(gumbel_noise=gumbel_noise, draw=draw)


def plain(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, PretendTensor)
    return tensor.values


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crossings]:
    """Pretends that there is a GPU; yields what is counted, from 0 on."""
    plain_tensor, plain_to = torch.tensor, Tensor.to
    _crossings.clear()

    def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        made = plain_tensor(data, **options)  # no memory is page-locked here
        return made if device is None or torch.device(device).type == "cpu" else _up(made, waits=True)

    def to(self: Tensor, *words: Any, **options: Any) -> Tensor:
        devices = [w for w in (*words, options.get("device")) if isinstance(w, str | torch.device)]
        devices += [w.device for w in words if isinstance(w, Tensor)]
        words = tuple(_values(w) for w in words)
        inner = self.values if isinstance(self, PretendTensor) else self
        moved = plain_to(inner, *(_CPU if isinstance(w, str) else w for w in words), **_on_cpu(options))
        goes_to_cpu = (
            torch.device(devices[0]).type == "cpu" if devices else not isinstance(self, PretendTensor)
        )
        if goes_to_cpu:
            if isinstance(self, PretendTensor) and not options.get("non_blocking"):
                _crossings.down[_place()] += 1
            return moved
        return (
            PretendTensor(moved)
            if isinstance(self, PretendTensor)
            else _up(moved, waits=not options.get("non_blocking"))
        )

    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    monkeypatch.setattr(sampling, "kernels", kernels)
    monkeypatch.setattr(draw_module, "kernels", kernels)
    monkeypatch.setattr(graphs, "record", record_by_running)
    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "cpu", lambda self: to(self, "cpu"))
    with _Mode():
        yield _crossings


def _on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "device": _CPU} if options.get("device") is not None else options


def _up(values: Tensor, waits: bool) -> PretendTensor:
    _crossings.send(waits)
    return PretendTensor(values)

"""How weights reach vLLM's workers: which way is chosen, and how long a sender keeps what it shares;
without vLLM or a GPU."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.refused import refused
from tests.vllm import pretend_gpu
from tlt.base.config.vllm import VllmSection
from tlt.engine.vllm import transfer
from tlt.models.hf.weights import content_hash


@pytest.mark.parametrize(
    ("asked", "is_cuda", "size", "has_own_worker", "way"),
    [
        ("auto", True, 1, True, "ipc"),
        ("ipc", True, 1, True, "ipc"),
        ("host", True, 1, True, "host"),
        ("auto", True, 2, True, "host"),
        ("auto", False, 1, True, "host"),
        ("host", False, 2, True, "host"),
        ("auto", True, 1, False, "direct"),
        ("auto", False, 1, False, "direct"),
        ("host", True, 1, False, "direct"),
    ],
)
def test_gpu_memory_is_shared_where_one_worker_process_has_this_gpu(
    asked: Any, is_cuda: bool, size: int, has_own_worker: bool, way: str
) -> None:
    section = VllmSection(transfer=asked, tensor_parallel=size)
    assert transfer.choose_way(section, is_cuda=is_cuda, has_own_worker=has_own_worker) == way


def test_what_cannot_be_is_refused_and_never_replaced() -> None:
    for is_cuda, size, has_own_worker in itertools.product((False, True), (1, 2), (False, True)):
        if (is_cuda, size, has_own_worker) == (True, 1, True):
            continue
        section = VllmSection(transfer="ipc", tensor_parallel=size)
        with refused(r"^vllm.transfer: ipc: [^\n]*; give auto[^\n]*$"):
            transfer.choose_way(section, is_cuda=is_cuda, has_own_worker=has_own_worker)


class PretendWorker:
    """Hears calls; puts by what it is told to. shared: copies that the sender has made and not let go of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        self.shared = weakref.WeakSet[Tensor]()
        self.puts_by, self.answer = False, ""
        monkeypatch.setattr(transfer, "reduce_tensor", self.reduce)
        monkeypatch.setattr(torch.cuda, "get_device_properties", pretend_gpu.properties)
        monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)

    def reduce(self, tensor: Tensor) -> tuple[None, tuple[Any, ...]]:
        self.shared.add(tensor)
        self.answer = content_hash({"tried": tensor})
        return None, (tensor.data_ptr(),)

    def __call__(self, name: str, *arguments: Any) -> list[Any]:
        self.calls.append((name, len(self.shared)))
        if name == "tlt_shared_part":
            (part,) = arguments
            assert [list(handle) for handle in part["ipc_handles"]] == [[pretend_gpu.UUID]] * len(
                part["names"]
            )
        return [self.answer if name == "tlt_try_shared" else self.puts_by]


def test_a_copy_is_kept_while_the_worker_may_read_it_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, part = PretendWorker(monkeypatch), {"a": torch.ones(4, 6), "b": torch.arange(3)}
    carrier = transfer.SharedGpu(worker, torch.device("cpu"))
    carrier.begin(False)
    carrier.carry(False, part)
    worker.puts_by = True
    carrier.carry(False, part)
    worker.puts_by = False
    carrier.carry(False, part)
    carrier.end(False)
    assert worker.calls[2:] == [
        ("start_weight_update", 0),
        ("tlt_shared_part", 2),
        ("tlt_shared_part", 2),
        ("tlt_shared_part", 4),
        ("tlt_end_shared", 2),
    ]
    assert len(worker.shared) == 0


def test_what_is_shared_is_a_copy_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer goes on to write to its own, and a column of a matrix has gaps."""
    seen: list[Tensor] = []
    worker = PretendWorker(monkeypatch)
    carrier = transfer.SharedGpu(worker, torch.device("cpu"))
    monkeypatch.setattr(transfer, "reduce_tensor", lambda tensor: (None, (seen.append(tensor),)))
    own = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
    carrier.begin(True)
    carrier.carry(True, {"whole": own, "transposed": own.T})
    assert worker.calls[-2][0] == "start_draft_weight_update"
    assert all(torch.equal(one, other) for one, other in zip(seen, (own, own.T), strict=True))
    assert all(one.is_contiguous() and not one.requires_grad for one in seen)
    assert all(one.untyped_storage().data_ptr() != own.untyped_storage().data_ptr() for one in seen)


def test_a_worker_that_reads_something_else_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = PretendWorker(monkeypatch)
    monkeypatch.setattr(transfer, "reduce_tensor", lambda tensor: (None, ()))
    with refused(r"^vllm.transfer: ipc does not work here .other values arrive.*; give host$"):
        transfer.SharedGpu(worker, torch.device("cpu"))

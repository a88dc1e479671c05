"""Weights that a worker process reads in the memory of a GPU: vLLM's own transfer and our sending, over a
pretended GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.refused import refused
from tests.side_by_side import answers
from tests.vllm import pretend_gpu
from tests.vllm.parts import BASE, DRAFTER, assert_equal, in_vllm, vllm_engine
from tests.vllm.test_live import MODEL, changed_policy, countdown
from tlt.base.types import Request
from tlt.drafter.formats.folder import load_drafter
from tlt.drafter.forms import new_model
from tlt.engine.vllm import link, transfer
from tlt.models.packed import layer_by_layer

pytestmark = in_vllm


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> pretend_gpu.Memory:
    return pretend_gpu.Memory(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def shared(memory: pretend_gpu.Memory) -> Iterator[Any]:
    """vLLM with a worker of its own, to which everything has gone by `ipc` from the start."""
    from tlt.engine.vllm import start  # imports vllm

    with pytest.MonkeyPatch.context() as patch:
        arguments = start.arguments
        worker = {"worker_extension_cls": "tests.vllm.pretend_gpu_worker.PretendGpuWorker"}
        patch.setattr(start, "arguments", lambda settings: {**arguments(settings), **worker})
        patch.setattr(link.VllmSettings, "way", property(lambda settings: "ipc"))
        patch.setattr(transfer, "reduce_tensor", memory.reduce_tensor)
        patch.setattr(torch.cuda, "get_device_properties", pretend_gpu.properties)
        patch.setattr(torch.cuda, "ipc_collect", lambda: None)
        engine = vllm_engine(BASE, "4x1x4", DRAFTER, own_process=True)
        yield engine
        engine.link.close()


def push(engine: Any, policy: dict[str, Tensor], version: int, cut: str) -> None:
    """Torn layers vLLM must put by: it computes queries, keys and values as one, and there they come one
    by one."""
    if cut == "layer by layer":
        engine.load_policy(policy, version)
        return
    with engine.link.weights.loading_policy() as load:
        for name in policy:
            load({name: policy[name]})
    engine.policy_version = version


@pytest.mark.parametrize("cut", ["layer by layer", "torn layers"])
def test_a_policy_in_the_gpu_s_memory_is_the_one_that_answers(
    shared: Any, own: Any, memory: pretend_gpu.Memory, cut: str
) -> None:
    assert shared.link.call("tlt_receiver") == ["IPCWeightTransferEngine"]
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ
    requests = countdown(6, 25, temperature=0.0)
    before = answers(own, requests)
    assert_equal(requests, own, answers(shared, requests), BASE)
    for version, policy in ((1, changed_policy(0.7)), (2, dict(MODEL.tensors))):
        num_shared = memory.num_shared
        push(shared, policy, version, cut)
        own.load_policy(policy, version)
        assert memory.num_shared == num_shared + len(policy)
        assert memory.shared == set(), "nothing is kept when an update has ended"
        found = answers(shared, requests)
        assert_equal(requests, own, found, BASE)
        num_same = sum(found[key].token_ids == before[key].token_ids for key in found)
        assert num_same == (0 if version == 1 else len(found))


def test_what_is_kept_amid_an_update_is_what_vllm_has_put_by(shared: Any, memory: pretend_gpu.Memory) -> None:
    """A copy of the whole policy beside the policy would be too much."""
    numbers = []
    with shared.link.weights.loading_policy() as load:
        for part in layer_by_layer(MODEL.tensors):
            load(part)
            numbers.append(len(memory.shared))
    assert max(numbers) == 1, "the embedding, whose rows vLLM pads"
    assert memory.shared == set()


def test_a_drafter_in_the_gpu_s_memory_is_the_one_that_drafts(
    shared: Any, own: Any, memory: pretend_gpu.Memory
) -> None:
    requests: list[Request] = countdown(6, 60)
    trained, spoiled = (
        load_drafter(DRAFTER, MODEL.config).tensors,
        new_model(shared.drafter.shape).initialize(9).state_dict(),
    )
    lengths = []
    for version, tensors in enumerate((spoiled, trained), start=1):
        shared.drafter.load(tensors, version)
        assert memory.shared == set()
        shared.stats = type(shared.stats)()
        assert_equal(requests, own, answers(shared, requests), BASE)
        lengths.append(shared.stats.accept_length)
    assert lengths[0] < 2 < 3.5 < lengths[1]


def test_a_gpu_that_cannot_be_shared_is_refused_in_one_line(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: pretend_gpu.SimpleNamespace(uuid="GPU-other")
    )
    with refused(r"^vllm.transfer: ipc does not work here .*GPU-other.*; give host$"):
        transfer.SharedGpu(shared.link.call, torch.device("cpu"))

"""Packed attention as one kernel: what it is given is what the sequence by sequence reference computes. The
kernel itself runs on GPUs alone (`make gpu`); here a reference stands for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lossless.helpers import CONFIG
from tlt.models import flash
from tlt.models.attention import PackedCausal, SharedPrompts
from tlt.models.attention_form import PLAIN, AttentionForm, attend_causal

FAMILIES = [(4, [3, 5, 1]), (6, [2]), (3, [0, 4]), (5, []), (1, [7, 7])]


def reference(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, starts: Tensor, starts_k: Tensor, most: int, most_k: int,
    *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert torch.equal(starts, starts_k)
    assert starts.dtype == torch.int32
    assert most == most_k == int(starts.diff().max())
    assert enable_gqa == (q_NHD.shape[1] != k_NKD.shape[1])
    assert window_size[1] == 0
    form = AttentionForm(scale, None if window_size[0] < 0 else window_size[0] + 1)
    lengths = starts.diff().tolist()
    parts = zip(*(x.split(lengths) for x in (q_NHD, k_NKD, v_NKD)), strict=True)
    outputs = [attend_causal(*(x.transpose(0, 1) for x in part), form).transpose(0, 1) for part in parts]
    return torch.cat(outputs)


@pytest.fixture(params=[True, False], ids=["groups", "no groups"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def ungrouped(*tensors: Any, **options: Any) -> Tensor:
        assert "enable_gqa" not in options
        return reference(*tensors, **options)

    monkeypatch.setattr(flash, "serves", lambda qkv_NSD, form: True)
    monkeypatch.setattr(flash, "_takes_groups", lambda: request.param)
    monkeypatch.setattr(flash.varlen, "varlen_attn", reference if request.param else ungrouped)


def made(kind: str) -> PackedCausal:
    if kind == "shared":
        return SharedPrompts(CONFIG, FAMILIES)
    return PackedCausal(CONFIG, [5, 1, 9, 2])


@pytest.mark.parametrize(
    "form", [PLAIN, AttentionForm(scale=0.3), AttentionForm(window=3)], ids=["plain", "scaled", "windowed"]
)
@pytest.mark.parametrize("kind", ["packed", "shared"])
@pytest.mark.usefixtures("kernel")
def test_one_kernel_gives_what_each_sequence_gives_and_the_same_gradients(
    kind: str, form: AttentionForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    num_tokens = len(made(kind).positions())
    qkv_NSD = torch.randn(num_tokens, CONFIG.num_qkv, CONFIG.head_dim, dtype=torch.float64).requires_grad_()
    weights = torch.randn(num_tokens, CONFIG.num_heads * CONFIG.head_dim, dtype=torch.float64)
    found = made(kind)(0, qkv_NSD, form)
    (gradient,) = torch.autograd.grad((found * weights).sum(), qkv_NSD)
    monkeypatch.setattr(flash, "serves", lambda qkv_NSD, form: False)
    wanted = made(kind)(0, qkv_NSD, form)
    (wanted_gradient,) = torch.autograd.grad((wanted * weights).sum(), qkv_NSD)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-12)


def test_a_cpu_and_other_types_keep_the_reference() -> None:
    assert not flash.serves(torch.zeros(3, 4, 8, dtype=torch.bfloat16), PLAIN)

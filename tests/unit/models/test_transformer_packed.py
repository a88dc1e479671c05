"""The engine's copy of a policy and the CPU's kernels: what they compute, and when they hold a policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.lossless.helpers import pack
from tests.unit.transformer_parts import (
    CASES,
    PROMPTS,
    our_config,
    packed,
    packed_logits,
    referee,
)
from tlt.models import cpu_kernels
from tlt.models.decoder import Linear, Transformer
from tlt.models.packed import PackedLinear, PackedTransformer


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
def test_in_bfloat16_no_norm_is_folded_so_that_weights_are_not_rounded_twice() -> None:
    model = referee("llama", torch.bfloat16)
    ours, theirs = packed(model).layers[1], model.model.layers[1]
    assert ours.qkv_linear.weight is not None
    assert ours.gate_up_linear.weight is not None
    assert torch.equal(ours.qkv_linear.weight[:48], theirs.self_attn.q_proj.weight)
    assert torch.equal(ours.gate_up_linear.weight[80:], theirs.mlp.up_proj.weight)


@pytest.mark.parametrize(("num_in", "num_out"), [(32, 96), (512, 700)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_matrix_multiplies_as_a_plain_one_whichever_kernel_runs(
    num_in: int, num_out: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(num_out, num_in, generator=generator),
        torch.randn(num_out, generator=generator),
    )
    linear = PackedLinear(num_in, num_out, torch.float32, torch.device("cpu"), has_bias=has_bias)
    linear.load(weight, bias if has_bias else None)
    if cpu_kernels.has_matrices(torch.float32):
        assert (linear.weight is None) == (num_in * num_out >= 320_000), "a large matrix exists once"
    for rows in (1, 3, 40, 300):
        x, residual = (
            torch.randn(rows, num_in, generator=generator),
            torch.randn(rows, num_out, generator=generator),
        )
        expected = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-3)
        if not has_bias:
            before = residual.clone()
            torch.testing.assert_close(
                linear.add_to(residual, x).double(), expected + residual, rtol=1e-5, atol=1e-3
            )
            assert torch.equal(residual, before)
    with pytest.raises(RuntimeError, match="was expected"):
        linear.load(weight[:-1])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_matrix_in_bfloat16_multiplies_as_torch_does(
    has_bias: bool, has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processor has instructions for it in oneDNN's layout, else in the plain one."""
    monkeypatch.setattr(cpu_kernels, "has_bfloat16", lambda: has_instructions)
    generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16
    weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((700, 512), (700,)))
    linear = PackedLinear(512, 700, dtype, torch.device("cpu"), has_bias=has_bias)
    linear.load(weight, bias if has_bias else None)
    assert (linear.weight is None) == (has_instructions and torch.backends.mkldnn.is_available())
    for rows in (1, 5, 70):
        x, residual = (torch.randn(rows, n, generator=generator).to(dtype) for n in (512, 700))
        exact = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
        assert linear(x).dtype == dtype
        torch.testing.assert_close(linear(x).double(), exact, rtol=2.0**-7, atol=0.05)
        if not has_bias:
            torch.testing.assert_close(
                linear.add_to(residual, x).double(), exact + residual, rtol=2.0**-7, atol=0.1
            )


@pytest.mark.parametrize("rows", [7, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_trainable_linear_and_its_gradients_are_those_of_torch(rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    ours = Linear(40, 96, bias=has_bias)
    theirs = nn.Linear(40, 96, bias=has_bias).double()
    theirs.load_state_dict(ours.state_dict())
    inputs = torch.randn(rows, 40)
    x, y = inputs.clone().requires_grad_(), inputs.double().requires_grad_()
    weights = torch.randn(rows, 96)
    (ours(x) * weights).sum().backward()
    (theirs(y) * weights).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-4)
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), expected.grad, rtol=1e-4, atol=1e-3)


def test_a_model_is_packed_for_its_own_device_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        ours = PackedTransformer(our_config(CASES["llama"]), torch.float32, "cpu")
    assert ours.rope.cos_P1D.device.type == "cpu"


@torch.no_grad()
def test_a_packed_transformer_reports_its_version_and_refuses_a_policy_with_a_tensor_missing(
    case: str,
) -> None:
    model = referee(case, torch.float32)
    tensors = dict(model.named_parameters())
    ours = PackedTransformer(our_config(model.config), torch.float32)
    assert ours.version == -1
    for name in tensors:
        with pytest.raises(KeyError, match=name):
            ours.load({other: tensor for other, tensor in tensors.items() if other != name}, version=3)
    ours.load(tensors, version=4)
    assert ours.version == 4


@torch.no_grad()
def test_loading_another_policy_replaces_every_weight(case: str) -> None:
    model = referee(case, torch.float64)
    ours = pack(Transformer(our_config(model.config)))
    ours.load(dict(model.named_parameters()), version=1)
    torch.testing.assert_close(
        packed_logits(ours, PROMPTS), packed_logits(packed(model), PROMPTS), atol=0, rtol=0
    )

"""A matrix in panels multiplies as PyTorch does, and a row's result is its own to the last bit: whatever rows
are multiplied with it, and by however many threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tlt.models.packed import PackedLinear

products = pytest.importorskip(
    "tlt.models.loops.products", reason="Numba is not installed: PyTorch multiplies"
)
tiles = pytest.importorskip("tlt.models.loops.tiles")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7}
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 20, 33, 64, 128)
SHAPES = [(40, 24), (512, 700), (96, 80), (300, 1465)]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_exact_arithmetic(
    num_in: int, num_out: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight, bias = random(num_out, num_in, dtype=dtype), random(num_out, dtype=dtype, seed=1)
    linear = PackedLinear(num_in, num_out, dtype, torch.device("cpu"), has_bias=has_bias)
    linear.load(weight, bias if has_bias else None)
    assert linear.weight is None, "a matrix exists once"
    for rows in (0, 1, 3, 40, 300):
        x, residual = random(rows, num_in, dtype=dtype, seed=2), random(rows, num_out, dtype=dtype, seed=3)
        exact = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
        close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * num_in**0.5}
        assert linear(x).dtype == dtype
        torch.testing.assert_close(linear(x).double(), exact, **close)
        if not has_bias:
            before = residual.clone()
            torch.testing.assert_close(linear.add_to(residual, x).double(), exact + residual, **close)
            assert torch.equal(residual, before)
    with pytest.raises(RuntimeError, match="was expected"):
        linear.load(weight[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_among_others(
    num_in: int, num_out: int, dtype: torch.dtype
) -> None:
    panels = products.Panels(num_in, num_out, dtype)
    panels.load(random(num_out, num_in, dtype=dtype))
    x = random(max(ROWS), num_in, dtype=dtype, seed=2)
    threads, alone = torch.get_num_threads(), torch.cat([panels.multiply(row[None]) for row in x])
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for rows in ROWS:
                assert torch.equal(panels.multiply(x[-rows:]), alone[-rows:]), (rows, num_threads)
    finally:
        torch.set_num_threads(threads)


def test_each_product_is_added_in_the_order_of_the_inputs_with_one_rounding() -> None:
    """1 + 2⁻²⁴ rounds to 1, so that an order that began with the small ones would give more; with two
    roundings (1 + 2⁻¹²)² would lose its 2⁻²⁴, which the last input brings to light."""
    panels = products.Panels(6, 16, torch.float32)
    weight = torch.tensor([1.0, 2.0**-24, 2.0**-24, 2.0**-24, 2.0**-24, -1.0])
    panels.load(weight.expand(16, 6))
    assert panels.multiply(torch.ones(1, 6)).eq(0.0).all()
    panels.load(torch.tensor([-1.0 - 2.0**-11, 1.0 + 2.0**-12, 0.0, 0.0, 0.0, 0.0]).expand(16, 6))
    assert panels.multiply(torch.tensor([[1.0, 1.0 + 2.0**-12, 0.0, 0.0, 0.0, 0.0]])).eq(2.0**-24).all()


@pytest.mark.skipif(not tiles.are_there(), reason="the processor has no AMX")
def test_tiles_are_used_and_pytorchs_own_stay_right_beside_them() -> None:
    """The order of sums tells who multiplied: 2²⁴ + 1 rounds to 2²⁴, so that a one stays only where all second
    numbers of 16 pairs are added by themselves."""
    panels = products.Panels(32, 16, torch.bfloat16)
    weight = torch.zeros(16, 32, dtype=torch.bfloat16)
    weight[:, 0], weight[:, 1], weight[:, 2] = 2.0**24, 1.0, -(2.0**24)
    panels.load(weight)
    x = torch.ones(40, 32, dtype=torch.bfloat16)
    big, dense = random(64, 512, dtype=torch.bfloat16), random(700, 512, dtype=torch.bfloat16, seed=1)
    before = torch.nn.functional.linear(big, dense)
    for _ in range(3):
        assert panels.multiply(x).eq(1.0).all()
        assert torch.equal(torch.nn.functional.linear(big, dense), before)

"""A matrix in oneDNN's layout multiplies as F.linear does, also where a small input is repeated for its
sake."""

import pytest
import torch
import torch.nn.functional as F

from tlt.models import cpu_kernels
from tlt.models.cpu_kernels import FASTEST_ROWS, MIN_REPEATED, OneDnnMatrix

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


@needs_onednn
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(128, 64), (1024, MIN_REPEATED // 1024 + 1)], ids=["small", "large"])
def test_products_of_any_number_of_rows_are_those_of_a_plain_matrix(
    num_rows: int, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    num_in, num_out = shape
    weight, x, bias = (
        torch.randn(size, generator=generator) for size in ((num_out, num_in), (num_rows, num_in), (num_out,))
    )
    residual = torch.randn(num_rows, num_out, generator=generator)
    matrix = OneDnnMatrix(weight.numel(), torch.float32)
    matrix.load(weight)
    exact = x.double() @ weight.double().T
    for product, expected in (
        (matrix.multiply(x, bias), exact + bias),
        (matrix.multiply(x, None), exact),
        (matrix.add_to(residual, x), exact + residual),
    ):
        assert product.shape == (num_rows, num_out)
        torch.testing.assert_close(product.double(), expected, rtol=0, atol=2e-4)


@needs_onednn
def test_only_small_inputs_of_large_matrices_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = []

    def repeat(x: torch.Tensor) -> torch.Tensor:
        repeated.append(len(x))
        return F.pad(x, (0, 0, 0, FASTEST_ROWS - len(x)))

    monkeypatch.setattr(cpu_kernels, "_repeat", repeat)
    for size in (MIN_REPEATED, MIN_REPEATED - 1000):
        matrix = OneDnnMatrix(size, torch.float32)
        matrix.load(torch.ones(size // 1000, 1000))
        for num_rows in range(1, 6):
            matrix.multiply(torch.ones(num_rows, 1000), None)
    assert repeated == [1, 2]

"""Equal rows on a GPU (tlt/models/equal.py and its kernels): a row's bits over row counts and ways to read a token,
in Triton's interpreter; and what the kernels compile to.

Needs Triton, which comes with vLLM and with PyTorch for GPUs, and no GPU. None of it has run on a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.vllm.equal_rows import compile_kernels, error_of_model, responses, rows_of_kernels, ways_to_read
from tests.vllm.interpreted import triton_process

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make vllm-test"
)

Call = Callable[..., Any]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Of a kernel, beside the reference's largest value."""


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Call]:
    with triton_process(interprets=True) as call:
        yield call


@DTYPES
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(interpreted: Call, dtype: torch.dtype) -> None:
    found = interpreted(rows_of_kernels, dtype)
    assert len(found) == 7
    assert {name: differing for name, (differing, _) in found.items()} == dict.fromkeys(found, 0)
    for name, (_, error) in found.items():
        assert error < ERRORS[dtype], name


@pytest.mark.parametrize("fault", ["block_k follows rows", "split k"])
def test_a_product_whose_order_follows_its_rows_is_seen(interpreted: Call, fault: str) -> None:
    found = interpreted(rows_of_kernels, torch.float32, fault)
    assert {name for name, (differing, _) in found.items() if differing} == {
        "product",
        "with bias",
        "with residual",
    }


@pytest.mark.parametrize(
    ("dtype", "architecture", "most_error"),
    [(torch.float32, "qwen3", 1e-5), (torch.bfloat16, "qwen2", 5e-2)],
    ids=["float32", "bfloat16"],
)
def test_prompt_chains_trees_and_packed_batches_have_the_same_bits(
    interpreted: Call, dtype: torch.dtype, architecture: str, most_error: float
) -> None:
    found = interpreted(ways_to_read, dtype, architecture)
    assert len(found) == 8
    assert found == dict.fromkeys(found, 0)
    assert interpreted(error_of_model, dtype, architecture) < most_error


def test_attention_whose_blocks_of_keys_follow_its_queries_is_seen(interpreted: Call) -> None:
    found = interpreted(ways_to_read, torch.float32, "llama", "one by one", "keys follow queries")
    assert found["one by one"] > 0


@pytest.mark.parametrize(
    ("dtype", "is_recorded"), [(torch.float32, True), (torch.bfloat16, False)], ids=["float32", "bfloat16"]
)
def test_speculation_changes_neither_tokens_nor_log_probabilities(
    interpreted: Call, dtype: torch.dtype, is_recorded: bool
) -> None:
    off = interpreted(responses, dtype, "off")
    assert len(off) == 4
    assert interpreted(responses, dtype, "artificial:4x2x7", is_recorded) == off


# ── compiled ────────────────────────────────────────────────────────────────────────────────────────────────

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


@pytest.mark.parametrize("arch", [80, 90])
def test_one_instruction_multiplies_at_every_number_of_rows(arch: int) -> None:
    with triton_process(interprets=False) as call:
        found = call(compile_kernels, arch)
    assert len(found) == 7 * 2 * 4
    for kernel in found:
        multiplies = kernel.name in ("multiply_kernel", "attend_kernel")
        is_half = multiplies and kernel.dtype == torch.bfloat16
        assert kernel.instructions == ({MMA} if is_half else set()), kernel
        assert (kernel.fused > 0) == (multiplies and not is_half), kernel
        assert kernel.local_bytes <= 128, kernel
    for name in ("rms_norm_kernel", "chosen_logprobs_kernel"):
        codes = {(kernel.dtype, kernel.code) for kernel in found if kernel.name == name}
        assert len(codes) == 2, "one code for all numbers of rows"

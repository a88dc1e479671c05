"""The law's kernel (speculation/law/fused.py) against the plain law: tokens and noise bit for bit, in Triton's
interpreter, and on a GPU where there is one; and what the kernel compiles to.

Needs Triton, which comes with vLLM and with PyTorch for GPUs, and no GPU.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.vllm.compiled import compile_apart
from tests.vllm.interpreted import (
    Rows,
    compile_as_called,
    draw_rows,
    make_noise,
    triton_process,
)
from tlt.base.types import SamplingParams
from tlt.speculation.law.draw import draw, draw_by_definition
from tlt.speculation.law.params import BatchParams, Law
from tlt.speculation.law.sampling import gumbel_noise

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make vllm-test"
)

PLAIN = (SamplingParams(), SamplingParams())
GREEDY = (SamplingParams(temperature=0), SamplingParams())
COLD = (SamplingParams(temperature=1e-4), SamplingParams(temperature=1e-35), SamplingParams(temperature=3.0))
TRUNCATED = (
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=1.3, min_p=0.2),
    SamplingParams(temperature=0),
    SamplingParams(),
)
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Call]:
    with triton_process(interprets=True) as call:
        yield call


def make_rows(
    vocab_size: int, params: tuple[SamplingParams, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Rows:
    """Keys and positions over the whole range of 32 bits, most tokens likely enough to be drawn."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(2**32, (len(params), 4), generator=generator)
    positions = torch.randint(2**32, (len(params),), generator=generator)
    logits = 2 * torch.randn(len(params), vocab_size, generator=generator)
    return Rows(logits.to(dtype), keys, positions, params)


def expected(rows: Rows) -> tuple[Tensor, Tensor]:
    return draw_by_definition(rows.logits, rows.law)


def logprob_bound(rows: Rows, tokens_R: Tensor) -> Tensor:
    """What fused.py promises of float32 and narrower logits."""
    scaled_RV = rows.law.params.scale(rows.logits[:, None])[:, 0]
    sizes_R = scaled_RV.gather(1, tokens_R[:, None])[:, 0].abs() + scaled_RV.logsumexp(-1).abs()
    return 2.0**-17 + 2.0**-22 * sizes_R


def assert_equal(rows: Rows, found: tuple[Tensor, Tensor]) -> None:
    tokens_R, logprobs_R = expected(rows)
    assert torch.equal(found[0], tokens_R)
    assert found[1].dtype == logprobs_R.dtype
    assert bool(((found[1] - logprobs_R).abs() <= logprob_bound(rows, tokens_R)).all())


# ── bit for bit, in the interpreter ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 61, 1000, 2047, 2048, 2049, 2051, 6143])
def test_noise_is_the_plain_laws_bit_for_bit_whatever_the_vocabulary(
    interpreted: Call, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    keys_B4 = torch.randint(2**32, (3, 4), generator=generator)
    positions_BT = torch.tensor([[0, 1], [2**31 - 1, 2**31], [2**32 - 1, 77]])
    found = interpreted(make_noise, keys_B4, positions_BT, vocab_size)
    assert torch.equal(
        found.view(torch.int32), gumbel_noise(keys_B4, positions_BT, vocab_size).view(torch.int32)
    )


@pytest.mark.parametrize(
    "params", [PLAIN, GREEDY, COLD, TRUNCATED], ids=["plain", "greedy", "cold", "truncated"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 61, 1000, 2049])
def test_tokens_are_the_plain_laws_and_log_probabilities_within_the_bound(
    interpreted: Call, vocab_size: int, dtype: torch.dtype, params: tuple[SamplingParams, ...]
) -> None:
    for seed in range(3):
        rows = make_rows(vocab_size, params, dtype, seed)
        assert_equal(rows, interpreted(draw_rows, rows, vocab_size))


@pytest.mark.parametrize("params", [PLAIN, TRUNCATED[:2]], ids=["plain", "truncated"])
def test_a_vocabulary_of_152064_in_bf16_is_drawn_from_alike(
    interpreted: Call, params: tuple[SamplingParams, ...]
) -> None:
    rows = make_rows(152064, params, torch.bfloat16)
    assert_equal(rows, interpreted(draw_rows, rows, 152064))


def test_a_padded_head_is_read_up_to_the_vocabulary(interpreted: Call) -> None:
    rows = make_rows(61, PLAIN)
    assert_equal(rows, interpreted(draw_rows, rows, 64))


def test_rows_are_laws_of_their_own_in_any_order_and_number(interpreted: Call) -> None:
    rows = make_rows(2100, TRUNCATED)
    whole = interpreted(draw_rows, rows, 2100)
    order = torch.tensor([3, 0, 4, 4, 1, 2, 0])
    shuffled = Rows(
        rows.logits[order], rows.keys[order], rows.positions[order], tuple(TRUNCATED[i] for i in order)
    )
    found = interpreted(draw_rows, shuffled, 2100)
    assert torch.equal(found[0], whole[0][order])
    assert torch.equal(found[1], whole[1][order]), "not a bit depends on the batch"


def tied(vocab_size: int = 5000) -> Rows:
    """Greedy rows of two values, the larger one at a few tokens: neighbours, in one block, in several."""
    rows = make_rows(vocab_size, (SamplingParams(temperature=0),) * 4)
    logits = torch.zeros_like(rows.logits)
    for row, tokens in enumerate([(7, 8), (100, 1999), (2047, 2048, 4999), ()]):
        logits[row, list(tokens)] = 1.0
    return Rows(logits, rows.keys, rows.positions, rows.params)


def test_of_equal_scores_the_lowest_token_wins_within_a_block_and_across_blocks(interpreted: Call) -> None:
    tokens_R, logprobs_R = interpreted(draw_rows, tied(), 5000)
    assert tokens_R.tolist() == [7, 100, 2047, 0]
    assert logprobs_R[3].item() == pytest.approx(-math.log(5000), abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_where_every_token_is_doubled_the_first_of_both_is_drawn(
    interpreted: Call, dtype: torch.dtype, num_rows: int
) -> None:
    """1,003 tokens, and so cold that beside the logits the noise is less than a unit in the last place:
    all scores are tied."""
    laws = (SamplingParams(temperature=0), SamplingParams(temperature=1e-35))
    rows = make_rows(1003, tuple(laws[row % 2] for row in range(num_rows)), dtype)
    rows.logits[:, 501:1002] = rows.logits[:, :501]
    tokens_R, _ = interpreted(draw_rows, rows, 1003)
    assert torch.equal(tokens_R, expected(rows)[0])
    assert not bool(((tokens_R >= 501) & (tokens_R < 1002)).any())


def masked() -> Rows:
    """Tokens that grammar or a penalty forbids: some, whole blocks, all but one."""
    rows = make_rows(5000, (SamplingParams(),) * 3)
    logits = rows.logits.clone()
    logits[0, ::3], logits[1, :4500], logits[2] = -math.inf, -math.inf, -math.inf
    logits[2, 4321] = -2e30
    return Rows(logits, rows.keys, rows.positions, rows.params)


def test_forbidden_tokens_are_never_drawn_and_have_no_mass(interpreted: Call) -> None:
    found = interpreted(draw_rows, masked(), 5000)
    assert_equal(masked(), found)
    assert found[0][2].item() == 4321
    assert found[1][2].item() == 0.0


def test_logits_that_are_no_distribution_give_a_log_probability_that_is_none(interpreted: Call) -> None:
    """The engine refuses such a policy by its log-probability (engine/sequence.py)."""
    rows = make_rows(5000, (SamplingParams(),) * 4)
    rows.logits[0, [4000, 7]], rows.logits[1], rows.logits[2, 4500], rows.logits[3] = (
        math.nan,
        -math.inf,
        math.inf,
        math.nan,
    )
    tokens_R, logprobs_R = interpreted(draw_rows, rows, 5000)
    assert tokens_R.tolist() == expected(rows)[0].tolist() == [7, 0, 4500, 0]
    assert logprobs_R.isnan().all()


# ── compiled ────────────────────────────────────────────────────────────────────────────────────────────────


def test_for_gpus_of_two_generations_it_compiles_without_spilling_or_contracting() -> None:
    compiled = compile_apart([80, 90])
    assert {(c["arch"], c["kernel"]) for c in compiled} == {
        (arch, kernel) for arch in ("sm_80", "sm_90") for kernel in ("law", "law after truncation", "noise")
    }
    for kernel in compiled:
        assert kernel["spilled_bytes"] == kernel["stack_bytes"] == 0
        assert kernel["registers"] <= 64, "four programs on a multiprocessor"
        assert kernel["shared_bytes"] <= 2048
        assert kernel["float32_fma"] == 0
        assert 40 < kernel["float64"] < 100, "two logarithms for each value"


def test_the_very_arguments_of_a_draw_compile_for_a_gpu_that_is_not_here() -> None:
    """Compiled by its signature a kernel says nothing of how Triton binds what it is called with: tuples,
    and what is None."""
    cases = [
        (dtype, vocab_size, params)
        for dtype, vocab_size in ((torch.bfloat16, 151936), (torch.float32, 61), (torch.float64, 5000))
        for params in (PLAIN, GREEDY, COLD, TRUNCATED)
    ]
    with triton_process(interprets=False) as call:
        found = call(compile_as_called, cases)
    kernels = ("law_kernel", "chosen_logprobs_kernel", "noise_kernel")
    assert found == [f"{name} of 8 warps for 90" for name in kernels] * len(cases)


def test_compiled_as_triton_does_by_itself_it_would_contract() -> None:
    compiled = compile_apart([90], {"num_warps": 8})
    assert all(kernel["float32_fma"] for kernel in compiled if kernel["kernel"] != "noise")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "params", [PLAIN, GREEDY, COLD, TRUNCATED], ids=["plain", "greedy", "cold", "truncated"]
)
@pytest.mark.parametrize("vocab_size", [1, 61, 2049, 152064])
def test_on_a_gpu_it_draws_as_the_cpu_does(vocab_size: int, params: tuple[SamplingParams, ...]) -> None:
    """A float64 logarithm may err in its last bit: of noise, one value in a million may be a neighbour of
    the plain law's."""
    rows = make_rows(vocab_size, params)
    law = Law(rows.keys.cuda(), rows.positions.cuda(), BatchParams.of(params, "cuda"))
    tokens_R, logprobs_R = draw(rows.logits.cuda(), law)
    assert_equal(rows, (tokens_R.cpu(), logprobs_R.cpu()))
    noise = gumbel_noise(law.keys_R4, law.positions_R[:, None], vocab_size).cpu()
    units = noise.view(torch.int32) - gumbel_noise(rows.keys, rows.positions[:, None], vocab_size).view(
        torch.int32
    )
    assert units.abs().max() <= 1
    assert units.count_nonzero() <= max(noise.numel() // 10**6, 1)

"""The law's compiled loops draw what the reference draws: every token, and its log-probability to some units
of float32.

Error rate: none. Draws are compared one by one, with the noise that the reference makes whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lossless.helpers import make_engine, make_policy, make_requests, tokens_of
from tlt.base.strategy import Strategy
from tlt.base.types import SamplingParams
from tlt.speculation.law import draw as draw_module
from tlt.speculation.law.draw import draw, draw_by_definition
from tlt.speculation.law.params import BatchParams, Law
from tlt.speculation.law.sampling import gumbel_noise
from tlt.speculation.tuner.tuner import FixedTuner

compiled = pytest.importorskip(
    "tlt.speculation.law.compiled", reason="Numba is not installed: the reference draws"
)

POLICY = make_policy()
REQUESTS = make_requests(num_problems=4, num_samples=2, seed=5)
CHAIN, TREE = Strategy("learned", 4, 1, 4), Strategy("learned", 3, 2, 6)
LAWS = (
    SamplingParams(1.0),
    SamplingParams(0.6),
    SamplingParams(0.0),
    SamplingParams(1e-3),
    SamplingParams(1e-30),
    SamplingParams(25.0),
)
TRUNCATING = (
    *LAWS,
    SamplingParams(1.0, top_k=5),
    SamplingParams(0.8, top_p=0.9),
    SamplingParams(1.3, min_p=0.02),
)

Logits = Callable[[int, int, torch.Generator], Tensor]


def peaked(num_rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    logits_RV = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    logits_RV[torch.arange(num_rows), torch.randint(vocab_size, (num_rows,), generator=generator)] += 12
    return logits_RV


SHAPES: dict[str, Logits] = {
    "normal": lambda R, V, g: 3 * torch.randn(R, V, generator=g),
    "peaked": peaked,
    "flat": lambda R, V, g: torch.zeros(R, V),
    "tied": lambda R, V, g: torch.randint(-2, 3, (R, V), generator=g).float(),
    "large": lambda R, V, g: 1e4 + torch.randn(R, V, generator=g),
    "with impossible tokens": lambda R, V, g: torch.randn(R, V, generator=g).masked_fill(
        torch.rand(R, V, generator=g) < 0.5, -torch.inf
    ),
}


def cases(num_rows: int, seed: int, laws: tuple[SamplingParams, ...]) -> Law:
    generator = torch.Generator().manual_seed(seed)
    keys_R4 = torch.randint(2**32, (num_rows, 4), generator=generator)
    positions_R = torch.randint(2**32, (num_rows,), generator=generator)
    return Law(keys_R4, positions_R, BatchParams.of([laws[row % len(laws)] for row in range(num_rows)]))


def disagreement(logits_RV: Tensor, law: Law) -> tuple[int, float]:
    """Returns how many tokens are not the reference's, and the largest difference of log-probabilities
    over its bound."""
    expected, expected_logprobs = draw_by_definition(logits_RV, law)
    found, logprobs = draw(logits_RV, law)
    scaled_RV = law.params.scale(logits_RV[:, None])[:, 0].float()
    size_R = scaled_RV.gather(1, expected[:, None])[:, 0].abs() + scaled_RV.logsumexp(-1).abs()
    off_R = (logprobs - expected_logprobs).abs() / (2.0**-17 + 2.0**-22 * size_R)
    return int((found != expected).sum()), off_R.max().item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1200, 61), (300, 1003), (120, 1024), (120, 5001), (9, 151_936)]
)
def test_tokens_are_the_references(shape: str, num_rows: int, vocab_size: int) -> None:
    for seed, laws in enumerate((LAWS, TRUNCATING)):
        logits_RV = SHAPES[shape](num_rows, vocab_size, torch.Generator().manual_seed(seed))
        num_different, worst = disagreement(logits_RV, cases(num_rows, seed, laws))
        assert num_different == 0
        assert worst <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_half_precision_the_law_is_that_of_the_numbers_it_holds(dtype: torch.dtype) -> None:
    logits_RV = SHAPES["normal"](200, 501, torch.Generator().manual_seed(1)).to(dtype)
    assert disagreement(logits_RV, cases(200, 1, TRUNCATING))[0] == 0


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_rows_are_shared_by_threads(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(compiled, "VALUES_PER_THREAD", 100)
    logits_RV = SHAPES["normal"](37, 203, torch.Generator().manual_seed(2))
    assert disagreement(logits_RV, cases(37, 2, TRUNCATING))[0] == 0


# ── where two tokens are as good as each other ──────────────────────────────────────────────────────────────


def tied(position: int, vocab_size: int = 300) -> tuple[Tensor, Law, list[int]]:
    """Returns logits whose two best scores are equal bit for bit, their law, and the two tokens."""
    keys_14, positions_1 = torch.tensor([[1, 2, 3, 4]]), torch.tensor([position])
    noise_V = gumbel_noise(keys_14, positions_1[:, None], vocab_size)[0, 0]
    logits_1V = torch.zeros(1, vocab_size)
    for score in torch.linspace(40, 41, 1000):
        pair = [int(position * 37 % vocab_size), int(position * 101 % vocab_size)]
        logits_1V[0, pair] = score - noise_V[pair]
        scores = logits_1V[0] + noise_V
        if pair[0] != pair[1] and scores[pair[0]] == scores[pair[1]]:
            return logits_1V, Law(keys_14, positions_1, BatchParams.of([SamplingParams()])), sorted(pair)
    raise AssertionError("no tie was found")


@pytest.mark.parametrize("position", [1, 8])
def test_a_tie_is_left_to_the_reference_and_falls_to_the_lowest_id(position: int) -> None:
    logits_1V, law, (lowest, _) = tied(position)
    assert compiled.draw(logits_1V, law)[2].tolist() == [0]
    assert draw(logits_1V, law)[0].tolist() == [lowest]


@pytest.mark.parametrize(("size", "is_tight"), [(0, False), (40, False), (10_000, False), (1e6, True)])
def test_a_lead_that_float32_could_have_made_up_is_left_to_the_reference(size: float, is_tight: bool) -> None:
    """Of logits near 0 and of large ones.

    is_tight: the second token is the one whose noise is nearest to the bound by which tokens are passed over.
    """
    num_rows, vocab_size = 200, 300
    keys_R4 = torch.randint(2**32, (num_rows, 4), generator=torch.Generator().manual_seed(8))
    positions_R = torch.arange(num_rows)
    noise_RV = gumbel_noise(keys_R4, positions_R[:, None], vocab_size)[:, 0]
    logits_RV = torch.zeros(num_rows, vocab_size)
    for logits_V, noise_V in zip(logits_RV, noise_RV, strict=True):
        uniform_V = -torch.expm1(-torch.exp(-noise_V.double()))
        above_V = -uniform_V.log2().floor() * math.log(2) - noise_V
        best, second = (torch.tensor(0), 1 + above_V[1:].argmin()) if is_tight else noise_V.topk(2).indices
        logits_V[best] = size
        score = logits_V[best] + noise_V[best]
        logits_V[second] = torch.nextafter(score, torch.tensor(-torch.inf)) - noise_V[second]
    law = Law(keys_R4, positions_R, BatchParams.of([SamplingParams()] * num_rows))
    assert len(compiled.draw(logits_RV, law)[2]) == num_rows


def test_what_is_left_to_the_reference_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_1V, law, (lowest, _) = tied(3)
    generator = torch.Generator().manual_seed(4)
    logits_RV = torch.cat([3 * torch.randn(5, 300, generator=generator), logits_1V])
    positions_R = torch.cat([torch.arange(5), law.positions_R])
    law = Law(law.keys_R4.expand(6, -1).contiguous(), positions_R, law.params.repeat(6))
    asked: list[int] = []
    plain = draw_module.draw_by_definition
    monkeypatch.setattr(
        draw_module,
        "draw_by_definition",
        lambda logits, law: asked.append(len(logits)) or plain(logits, law),
    )
    found = draw(logits_RV, law)[0]
    assert asked == [1]
    assert found[5] == lowest


def test_few_rows_are_in_doubt() -> None:
    logits_RV = SHAPES["normal"](2000, 1003, torch.Generator().manual_seed(5))
    _, _, rows = compiled.draw(logits_RV, cases(2000, 5, (SamplingParams(), SamplingParams(0.7))))
    assert len(rows) <= 2


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_leaves_the_row_to_the_reference(broken: float) -> None:
    logits_RV = SHAPES["normal"](4, 1500, torch.Generator().manual_seed(6))
    logits_RV[2, 1200] = broken
    law = cases(4, 6, LAWS)
    found, expected = draw(logits_RV, law), draw_by_definition(logits_RV, law)
    assert found[0].tolist() == expected[0].tolist()
    assert not found[1][2].isfinite()
    assert found[1][[0, 1, 3]].isfinite().all()


# ── in the engine ───────────────────────────────────────────────────────────────────────────────────────────


def engine_tokens(strategy: Strategy, max_batch_size: int) -> Any:
    return tokens_of(
        make_engine(POLICY, FixedTuner(strategy), dtype=torch.float32, max_batch_size=max_batch_size),
        REQUESTS,
    )


@pytest.mark.parametrize(
    ("strategy", "max_batch_size"),
    [(Strategy.OFF, 1), (CHAIN, 6), (TREE, 6), (Strategy("ngram", 3, 2, 6), 6)],
    ids=str,
)
def test_an_engine_draws_the_same_without_numba(
    strategy: Strategy, max_batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_tokens = engine_tokens(strategy, max_batch_size)
    monkeypatch.setattr(draw_module, "compiled_loops", lambda: None)
    assert engine_tokens(strategy, max_batch_size) == compiled_tokens

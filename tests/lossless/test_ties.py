"""Of equal scores the lowest token id wins: in every dtype, batch and strategy, at temperature 0 and above.

    token     0 … 500 │ 501 … 1001 │ 1002
              ▲ wins    its twin     alone

Logits and noise of a token and of its twin are the same bit for bit, so a twin is never drawn. 1,003 is no
multiple of any kernel's width. The law's own kernel is held to the same in tests/vllm/test_fused_law.py.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.cases import cases
from tests.lossless.helpers import Switching, make_engine, make_policy, tokens_of
from tlt.base.strategy import Strategy
from tlt.base.types import Request, SamplingParams
from tlt.engine.own.engine import RolloutEngine
from tlt.models.decoder import ModelConfig
from tlt.speculation.law import draw as draw_module
from tlt.speculation.law.params import BatchParams
from tlt.speculation.law.sampling import gumbel_noise, sample
from tlt.speculation.tuner.tuner import FixedTuner

VOCAB, TWINS = 1003, 501
POLICY = make_policy(
    config=ModelConfig("llama", VOCAB, 32, 64, 2, 4, 2, 8, tie_embeddings=True, max_positions=64)
)
STRATEGIES = [
    Strategy.OFF,
    *(Strategy("learned", *shape) for shape in [(4, 1, 4), (3, 2, 6)]),
    *(Strategy(kind, 4, 1, 4) for kind in ("ngram", "hybrid")),
]
LAWS = (
    SamplingParams(0.0, max_tokens=8),
    SamplingParams(1.0, max_tokens=8),
    SamplingParams(1.0, top_p=0.9, max_tokens=8),
)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def requests(num: int) -> list[Request]:
    """Prompts that repeat themselves, so that retrieval has something to draft from."""
    return [Request(f"p{i // 2}", i % 2, (5, 9, 3, 5, 9, 3, i), LAWS[i % len(LAWS)]) for i in range(num)]


def doubled(values: Tensor) -> Tensor:
    return torch.cat([values[..., :TWINS], values[..., :TWINS], values[..., -1:]], dim=-1)


@pytest.fixture(autouse=True)
def _noise_of_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it ties hardly occur above temperature 0, where only greedy rows would prove anything."""
    monkeypatch.setattr(draw_module, "gumbel_noise", lambda *args: doubled(gumbel_noise(*args)))
    monkeypatch.setattr(
        draw_module, "compiled_loops", lambda: None
    )  # whose own ties are in test_compiled_law.py


def engine_with_twins(strategies: list[Strategy], dtype: torch.dtype, batch: int) -> RolloutEngine:
    tuner = FixedTuner(strategies[0]) if len(strategies) == 1 else Switching(strategies, seed=batch)
    engine = make_engine(POLICY, tuner, dtype=dtype, max_batch_size=batch)
    logits = engine.target.logits
    engine.target.logits = lambda features: doubled(logits(features))
    return engine


def twins_among(found: dict[tuple[str, int], tuple[int, ...]]) -> list[int]:
    return [token for tokens in found.values() for token in tokens if TWINS <= token < 2 * TWINS]


@pytest.mark.parametrize(
    ("batch", "dtype"),
    cases(product([1, 7, 40], DTYPES), usual=[(1, torch.bfloat16), (7, torch.float64), (40, torch.float32)]),
    ids=str,
)
def test_the_lowest_of_equal_scores_is_drawn_in_every_dtype_and_batch(dtype: torch.dtype, batch: int) -> None:
    engine = engine_with_twins(STRATEGIES, dtype, batch)
    found = tokens_of(engine, requests(max(batch, 3)))
    assert len({token for tokens in found.values() for token in tokens}) > 8, "many tokens were drawn"
    assert twins_among(found) == []


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_ties_fall_alike_whatever_drafts(strategy: Strategy) -> None:
    engine = engine_with_twins([strategy], torch.float64, batch=7)
    found = tokens_of(engine, requests(7))
    assert found == tokens_of(engine_with_twins([Strategy.OFF], torch.float64, batch=3), requests(7))
    assert twins_among(found) == []
    assert strategy.is_off or engine.stats.num_verifications > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 40])
@pytest.mark.parametrize("vocab_size", [1000, VOCAB])
def test_of_many_tied_scores_the_first_is_drawn(dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    """Scores of five values, so that some two hundred tokens share the largest. Python's `index` is the
    referee."""
    generator = torch.Generator().manual_seed(num_rows)
    logits_RV = torch.randint(-2, 3, (num_rows, vocab_size), generator=generator).to(dtype)
    noise_RV = torch.randint(0, 2, (num_rows, vocab_size), generator=generator).float()
    noise_RV[:, 0] = 0.0  # or the first token would win most of them
    params = [LAWS[row % 2] for row in range(num_rows)]
    is_sampled_R1 = torch.tensor([[p.temperature] for p in params], dtype=torch.float64)
    scores = (logits_RV.double() + is_sampled_R1 * noise_RV).tolist()
    expected = [row.index(max(row)) for row in scores]
    assert sample(logits_RV[:, None], noise_RV[:, None], BatchParams.of(params))[0][:, 0].tolist() == expected

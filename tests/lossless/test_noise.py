"""The law's noise is Gumbel, independent in everything the key holds, and a pure function of (key, position,
token).

Error rate: 25 statistics with fixed seeds, each failing a perfect generator with probability ALPHA = 1e-6;
together 2.5e-5. A statistic that cannot fail proves nothing: each has a planted fault, below, that makes
it fall under ALPHA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from tlt.base.types import Request, SamplingParams
from tlt.engine.own.noise import BatchLaw, StepNoise
from tlt.speculation.law import draw as draw_module
from tlt.speculation.law import sampling
from tlt.speculation.law.sampling import gumbel_noise, keys_tensor, noise_of_tokens, philox

ALPHA = 1e-6
Noise = Callable[[Tensor, Tensor, int], Tensor]
REQUEST = Request("problem", 3, (1, 2), SamplingParams(seed=17), "rollout", 5)


# ── the generator ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(int(word, 16)) for word in text.split())

    assert philox(words(counter), words(key)) == words(expected)


def test_a_word_becomes_noise_by_the_formula_up_to_both_ends_of_the_range() -> None:
    """-log(-log1p(-w)), w = (r + 1/2) / 2^32, in extended precision: the tails reach 22.9 and -3.13."""
    words = [0, 1, 2, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1]
    planted = tuple(torch.tensor(words, dtype=torch.int64) for _ in range(4))
    with patch.object(sampling, "philox", lambda counter, key: planted):
        found = gumbel_noise(
            keys_tensor([(0, 0, 0, 0)]), torch.zeros(1, 1, dtype=torch.int64), 4 * len(words)
        )
    w = (np.array(words, dtype=np.longdouble) + np.longdouble(0.5)) / np.longdouble(2) ** 32
    expected = (-np.log(-np.log1p(-w))).astype(np.float32)
    torch.testing.assert_close(found.view(-1, 4)[:, 0], torch.from_numpy(expected), rtol=1e-7, atol=0)
    assert found.dtype == torch.float32
    assert found.max() > 22.8
    assert found.min() < -3.1299


def test_requests_that_differ_in_any_field_have_different_keys() -> None:
    variants = [
        REQUEST,
        replace(REQUEST, problem_id="problem3"),
        replace(REQUEST, problem_id="proble", sample_index=3),
        replace(REQUEST, sample_index=33),
        replace(REQUEST, policy_step=53),
        replace(REQUEST, policy_step=3, sample_index=5),
        replace(REQUEST, purpose="evaluation"),
        replace(REQUEST, purpose="generate"),
        replace(REQUEST, params=SamplingParams(seed=18)),
        replace(REQUEST, params=SamplingParams(seed=2**63 - 17)),
    ]
    assert len({request.noise_key for request in variants}) == len(variants)


def test_numbers_of_numpy_have_the_key_of_the_same_python_numbers() -> None:
    plain = Request("p", 3, (1,), SamplingParams(seed=5), "rollout", 2)
    of_numpy = Request(
        np.str_("p"), np.int64(3), (1,), SamplingParams(seed=np.int32(5)), "rollout", np.uint8(2)
    )
    assert of_numpy.noise_key == plain.noise_key
    assert plain.noise_key == (4150161731, 1033059850, 3521089466, 362085091)


def test_what_is_no_part_of_the_key_does_not_change_it() -> None:
    other = replace(
        REQUEST,
        prompt_ids=(9,),
        params=SamplingParams(temperature=0.3, top_k=4, max_tokens=9, stop_ids=(1,), seed=17),
    )
    assert other.noise_key == REQUEST.noise_key


# ── the distribution ────────────────────────────────────────────────────────────────────────────────────────

NUM_TAIL = 1 << 21


@lru_cache(maxsize=1)
def values(noise: Noise) -> np.ndarray:
    """2 million values of one key, as float64."""
    keys = keys_tensor([REQUEST.noise_key])
    chunks = [
        noise(keys, torch.arange(start, start + 4096)[None], 256).flatten()
        for start in range(0, NUM_TAIL // 256, 4096)
    ]
    return torch.cat(chunks).double().numpy()


def goodness_of_fit(noise: Noise) -> float:
    """Kolmogorov–Smirnov against exp(-exp(-g))."""
    return float(stats.kstest(np.exp(-np.exp(-values(noise))), "uniform", method="asymp").pvalue)


def tail(upper: bool, probability: float) -> Callable[[Noise], float]:
    """Binomial test of how many values lie beyond the quantile of this probability."""

    def statistic(noise: Noise) -> float:
        if upper:
            count = int((values(noise) > -np.log(-np.log1p(-probability))).sum())
        else:
            count = int((values(noise) < -np.log(-np.log(probability))).sum())
        return float(stats.binomtest(count, NUM_TAIL, probability).pvalue)

    return statistic


def independence(first: Tensor, second: Tensor) -> float:
    """Chi-square of pairs of uniforms in 16 x 16 bins, and their correlation; the smaller p-value,
    doubled."""
    a, b = (torch.exp(-torch.exp(-x.flatten().double())).numpy() for x in (first, second))
    cells = np.bincount(
        (a * 16).astype(int).clip(0, 15) * 16 + (b * 16).astype(int).clip(0, 15), minlength=256
    )
    by_cells = stats.chisquare(cells).pvalue
    correlation = 12 * ((a - 0.5) * (b - 0.5)).mean()
    by_correlation = 2 * stats.norm.sf(abs(correlation) * np.sqrt(len(a)))
    return float(min(1.0, 2 * min(by_cells, by_correlation)))


def neighbouring_tokens(lag: int) -> Callable[[Noise], float]:
    def statistic(noise: Noise) -> float:
        block = noise(keys_tensor([REQUEST.noise_key]), torch.arange(512)[None], 256)
        return independence(block[..., :-lag], block[..., lag:])

    return statistic


def neighbouring_positions(lag: int) -> Callable[[Noise], float]:
    def statistic(noise: Noise) -> float:
        block = noise(keys_tensor([REQUEST.noise_key]), torch.arange(2048)[None], 64)
        return independence(block[:, :-lag], block[:, lag:])

    return statistic


def tokens_against_positions(noise: Noise) -> float:
    """The noise of (position a, token block b) against that of (b, a): a counter must not confuse the two."""
    block = noise(keys_tensor([REQUEST.noise_key]), torch.arange(256)[None], 1024)[0].view(256, 256, 4)
    upper = torch.triu_indices(256, 256, 1)
    return independence(block[upper[0], upper[1]], block[upper[1], upper[0]])


def between(make: Callable[[int], Request]) -> Callable[[Noise], float]:
    """Requests that differ in one field by one, each against the next."""

    def statistic(noise: Noise) -> float:
        keys = keys_tensor([make(i).noise_key for i in range(32)])
        block = noise(keys, torch.arange(16).expand(32, -1), 256)
        return independence(block[:-1], block[1:])

    return statistic


def between_purposes(noise: Noise) -> float:
    purposes = ("rollout", "evaluation", "generate")
    keys = keys_tensor([replace(REQUEST, purpose=purpose).noise_key for purpose in purposes])
    block = noise(keys, torch.arange(256).expand(3, -1), 256)
    return independence(block, block.roll(1, 0))


def between_key_words(word: int) -> Callable[[Noise], float]:
    """Keys that differ in one word, by one: nothing is left to the hash."""

    def statistic(noise: Noise) -> float:
        key = list(REQUEST.noise_key)
        keys = keys_tensor([tuple(k + i * (j == word) for j, k in enumerate(key)) for i in range(32)])
        block = noise(keys & 0xFFFFFFFF, torch.arange(16).expand(32, -1), 256)
        return independence(block[:-1], block[1:])

    return statistic


STATISTICS: dict[str, Callable[[Noise], float]] = {
    "fits": goodness_of_fit,
    **{f"upper tail {p:g}": tail(True, p) for p in (1e-2, 1e-4, 1e-5)},
    **{f"lower tail {p:g}": tail(False, p) for p in (1e-2, 1e-4, 1e-5)},
    **{f"tokens, lag {lag}": neighbouring_tokens(lag) for lag in (1, 2, 3, 4, 8)},
    **{f"positions, lag {lag}": neighbouring_positions(lag) for lag in (1, 2, 64)},
    "tokens against positions": tokens_against_positions,
    "samples": between(lambda i: replace(REQUEST, sample_index=i)),
    "steps": between(lambda i: replace(REQUEST, policy_step=i)),
    "seeds": between(lambda i: replace(REQUEST, params=SamplingParams(seed=i))),
    "problems": between(lambda i: replace(REQUEST, problem_id=f"{i}")),
    "purposes": between_purposes,
    **{f"key word {word}": between_key_words(word) for word in range(4)},
}


@pytest.mark.parametrize("name", STATISTICS)
def test_the_noise_is_gumbel_and_independent(name: str) -> None:
    assert STATISTICS[name](gumbel_noise) > ALPHA


# ── the statistics can fail ─────────────────────────────────────────────────────────────────────────────────


def with_philox(change: Callable[..., Any], num_rounds: int = 10) -> Noise:
    """Returns the noise of a changed generator."""

    def noise(keys: Tensor, positions: Tensor, vocab: int) -> Tensor:
        with patch.object(sampling, "philox", change), patch.object(sampling, "_ROUNDS", num_rounds):
            return gumbel_noise(keys, positions, vocab)

    return noise


def without_key(*words: int) -> Noise:
    index = torch.tensor(words)
    return lambda keys, positions, vocab: gumbel_noise(keys.index_fill(1, index, 0), positions, vocab)


eight_bits = with_philox(lambda c, key: tuple((w >> 24 << 24) + (1 << 23) for w in philox(c, key)))
summed_counter = with_philox(lambda c, key: philox((c[0] + c[1], c[1] * 0, c[2], c[3]), key))
two_rounds = with_philox(lambda c, key: torch.broadcast_tensors(*philox(c, key)), num_rounds=2)

FAULTS: list[tuple[Noise, Sequence[str]]] = [
    (eight_bits, ["upper tail 1e-05", "lower tail 1e-05"]),
    (lambda k, p, v: -torch.exp(-gumbel_noise(k, p, v)), ["fits", "upper tail 0.01"]),
    # log E instead of -log E: the right mean up to a sign, the tails exchanged
    (
        lambda k, p, v: 2 * 0.5772156649 - gumbel_noise(k, p, v),
        ["fits", "upper tail 1e-05", "lower tail 1e-05"],
    ),
    (lambda k, p, v: gumbel_noise(k, p // 2, v), ["positions, lag 1"]),
    (
        lambda k, p, v: gumbel_noise(k, p, v // 4).repeat_interleave(4, dim=-1),
        ["tokens, lag 1", "tokens, lag 2", "tokens, lag 3"],
    ),
    (summed_counter, ["positions, lag 1", "tokens against positions"]),
    (two_rounds, ["tokens, lag 4", "positions, lag 1"]),
    (without_key(0, 1, 2, 3), ["samples", "steps", "seeds", "problems", "purposes"]),
    *((without_key(word), [f"key word {word}"]) for word in range(4)),
]


@pytest.mark.parametrize(("fault", "names"), FAULTS)
def test_the_statistics_see_a_planted_fault(fault: Noise, names: Sequence[str]) -> None:
    assert [name for name in names if STATISTICS[name](fault) >= ALPHA] == []


# ── a pure function ─────────────────────────────────────────────────────────────────────────────────────────

WORD = st.integers(0, (1 << 32) - 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_noise_of_a_part_is_that_part_of_the_noise_bit_for_bit(data: st.DataObject) -> None:
    batch, width, vocab = (data.draw(st.integers(1, most)) for most in (5, 6, 70))
    keys = torch.tensor(
        data.draw(st.lists(st.lists(WORD, min_size=4, max_size=4), min_size=batch, max_size=batch))
    )
    starts = torch.tensor(data.draw(st.lists(st.integers(0, 1 << 20), min_size=batch, max_size=batch)))
    positions = starts[:, None] + torch.arange(width)
    whole = gumbel_noise(keys, positions, vocab)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=7)))
    columns = torch.tensor(data.draw(st.lists(st.integers(0, width - 1), min_size=1, max_size=7)))
    prefix = data.draw(st.integers(1, vocab))
    part = gumbel_noise(keys[rows], positions[rows][:, columns], prefix)
    assert torch.equal(part, whole[rows][:, columns, :prefix])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_change_the_noise(dtype: torch.dtype) -> None:
    keys, positions = keys_tensor([REQUEST.noise_key]), torch.arange(50)[None]
    expected = gumbel_noise(keys, positions, 61)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = gumbel_noise(keys, positions, 61)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("vocab", [1, 4, 61, 4099])
def test_the_noise_of_single_tokens_is_that_of_the_vocabulary(vocab: int) -> None:
    keys = keys_tensor([(2**32 - 1, 7, 0, 5), (1, 2, 3, 4)])
    positions = torch.tensor([[0, 9], [2**31 + 5, 2**32 - 1]])
    whole = gumbel_noise(keys, positions, vocab)
    places = list(product(range(2), range(2), {0, vocab // 2, vocab - 1}))
    rows, columns, tokens = (torch.tensor(part) for part in zip(*places, strict=True))
    for noise_of in (noise_of_tokens, draw_module.noise_of_tokens):
        assert torch.equal(
            noise_of(keys[rows], positions[rows, columns], tokens), whole[rows, columns, tokens]
        )


@pytest.mark.parametrize(
    "token_ids", [None, [60, 3, 3, 0, 41], list(range(61))], ids=["all", "some", "as many as there are"]
)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_drafts_are_ranked_with_the_laws_noise_of_their_position(
    token_ids: list[int] | None, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(draw_module, "compiled_loops", lambda: None)
    params = [SamplingParams(temperature=t) for t in (1.0, 0.0, 0.6)]
    requests = [replace(REQUEST, sample_index=i, params=p) for i, p in enumerate(params)]
    starts, ids = [7, 0, 4000], None if token_ids is None else torch.tensor(token_ids)
    noise = StepNoise(BatchLaw.of(requests, torch.device("cpu")), starts, 61)
    expected = gumbel_noise(
        keys_tensor([r.noise_key for r in requests]), torch.tensor(starts)[:, None] + torch.arange(5), 61
    )
    expected[1] = 0.0  # a greedy sequence has none
    for level in range(5):
        found = noise.of_level(level, ids)
        assert torch.allclose(
            found, expected[:, level] if ids is None else expected[:, level][:, ids], rtol=0, atol=2.0**-19
        )
    places = [(2, 4, 60), (0, 0, 5), (1, 1, 3), (0, 3, 5)]
    assert noise.of_tokens(places) == [expected[place].item() for place in places]


@pytest.mark.parametrize("vocab", [1, 1023, 1024, 1025, 5001])
def test_noise_to_rank_with_is_the_laws_whatever_the_vocabulary(vocab: int) -> None:
    keys = keys_tensor([(2**32 - 1, 7, 0, 5), (1, 2, 3, 4), (9, 9, 9, 9)])
    positions = torch.tensor([0, 2**31 + 5, 2**32 - 1])
    whole = gumbel_noise(keys, positions[:, None], vocab)[:, 0]
    chosen = torch.arange(vocab - 1, -1, -3)
    for token_ids, expected in ((None, whole), (chosen, whole[:, chosen])):
        found = draw_module.noise_to_rank_with(keys, positions, vocab, token_ids)
        assert torch.allclose(found, expected, rtol=0, atol=2.0**-19)

"""The law as compiled loops, for CPUs: noise is computed while a row is read, so it never lies in memory.

    a row of logits, 1,024 at a time, in the fastest cache
      Philox ─▶ 32-bit words ─▶ a bound of each score, from the word's leading bit: no logarithm
                                  ├─ below the best so far: the token cannot win (all but about ten of 152k)
                                  └─ above: its score, with the law's own noise
      Σ exp(logit - largest)  ─▶ the log-probability

The bound: E = -log(1 - w) ≥ w, so the noise -log E ≤ -log w ≤ (number of leading zero bits + 1) ln 2.
Libraries differ in the last bit of a float64 logarithm, so sampling.py redraws rows whose best scores are
that close: tokens are exact. Log-probabilities sum in another order; in float32 they differ by at most
2⁻¹⁷ + 2⁻²² (|scaled logit| + |logsumexp|).

Inputs: CPU tensors of at most 32 bits.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from tlt.base.loops import REORDERED, exp_of
from tlt.base.types import SamplingParams
from tlt.speculation.law.params import BatchParams, Law, truncate

CHUNK = 1024
"""Values processed together: their logits and words fit into the fastest cache."""

VALUES_PER_THREAD = 1 << 16
"""Waking another thread takes about 30 µs."""

_F32, _I32, _U32, _U64 = np.float32, np.int32, np.uint32, np.uint64
_MULTIPLIER_0, _MULTIPLIER_1 = _U64(0xD2511F53), _U64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = _U32(0x9E3779B9), _U32(0xBB67AE85)
_LN2 = _F32(math.log(2))
_TO_UNIT = _F32(2.0**-32)
_LEAST_NOISE = _F32(-math.log(33 * math.log(2)))
_SQRT_HALF_BITS = _I32(np.float32(math.sqrt(0.5)).view(np.int32))

_UNCHECKED = REORDERED | {"nnan"}
"""For loops that only bound or approximate, and meet no NaN."""


# ── Python's side ───────────────────────────────────────────────────────────────────────────────────────────


def load() -> None:
    """Compiles ahead of the first step: a second or two."""
    key_14, zero_1 = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    draw(torch.zeros(1, 4), Law(key_14, zero_1, BatchParams.of([SamplingParams()])))
    noise_to_rank_with(key_14, zero_1, 4, None)
    noise_of_tokens(key_14, zero_1, zero_1)


def draw(logits_RV: Tensor, law: Law) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (tokens, int64[R]; log-probabilities, float32[R]; rows that sampling.py must draw, those with a
    NaN among them)."""
    params, R = law.params, len(logits_RV)
    logits_RV, inverse_R = _scaled(logits_RV, params)
    kept_RV = truncate(logits_RV[:, None], params)[:, 0] if params.truncates else logits_RV
    logits = logits_RV.numpy()
    rows = (logits, kept_RV.numpy(), logits.max(axis=1) * inverse_R)
    by_row = (inverse_R, _column(params.noise_scale_B11, R), *_as_words(law.keys_R4, law.positions_R))
    tokens_R, logprobs_R, unsure_R = np.empty(R, np.int64), np.empty(R, np.float32), np.empty(R, np.bool_)
    _in_threads(_draw_rows, logits.size, R, (rows, by_row, (tokens_R, logprobs_R, unsure_R)))
    return torch.from_numpy(tokens_R), torch.from_numpy(logprobs_R), torch.from_numpy(unsure_R.nonzero()[0])


def logprobs(logits_RV: Tensor, tokens_R: Tensor, params: BatchParams) -> Tensor:
    """float32[R], of given tokens: the bits that `draw` returns with them."""
    logits_RV, inverse_R = _scaled(logits_RV, params)
    logits = logits_RV.numpy()
    rows = logits, logits.max(axis=1) * inverse_R, inverse_R
    logprobs_R = np.empty(len(logits_RV), np.float32)
    _in_threads(_logprob_rows, logits.size, len(logits), (*rows, tokens_R.numpy(), logprobs_R))
    return torch.from_numpy(logprobs_R)


def _scaled(logits_RV: Tensor, params: BatchParams) -> tuple[Tensor, Any]:
    """(logits, factor of each row that they still lack)."""
    logits_RV = logits_RV.float().contiguous()
    inverse_R = _column(params.inverse_temperature_B11, len(logits_RV))
    if not params.truncates:
        return logits_RV, inverse_R
    return params.scale(logits_RV[:, None])[:, 0], np.ones_like(inverse_R)


def noise_to_rank_with(
    keys_R4: Tensor, positions_R: Tensor, vocab_size: int, token_ids_V: Tensor | None
) -> Tensor:
    token_ids = np.arange(0) if token_ids_V is None else token_ids_V.numpy()
    noise_RV = np.empty((len(keys_R4), len(token_ids) or vocab_size), np.float32)
    _in_threads(
        _noise_rows, noise_RV.size, len(noise_RV), (*_as_words(keys_R4, positions_R), token_ids, noise_RV)
    )
    return torch.from_numpy(noise_RV)


def noise_of_tokens(keys_K4: Tensor, positions_K: Tensor, tokens_K: Tensor) -> Tensor:
    noise_K = np.empty(len(tokens_K), np.float32)
    _noise_of_tokens(*_as_words(keys_K4, positions_K), tokens_K.numpy(), noise_K)
    return torch.from_numpy(noise_K)


def _as_words(keys_R4: Tensor, positions_R: Tensor) -> tuple[Any, Any]:
    return keys_R4.numpy().astype(_U32), positions_R.numpy().astype(_U32)


def _column(values_R11: Tensor | None, num_rows: int) -> Any:
    return np.ones(num_rows, np.float32) if values_R11 is None else values_R11.flatten().float().numpy()


def _in_threads(rows_from_to: Any, num_values: int, num_rows: int, given: tuple[Any, ...]) -> None:
    num_parts = min(torch.get_num_threads(), num_rows, 1 + num_values // VALUES_PER_THREAD)
    bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
    mine, *rest = pairwise(bounds)
    others = [_threads().submit(rows_from_to, *part, *given) for part in rest]
    rows_from_to(*mine, *given)
    for other in others:
        other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(torch.get_num_threads() - 1, 1), "law")


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────


@njit(nogil=True, cache=True)
def _draw_rows(first, end, rows, law, drawn):  # type: ignore
    """rows: (logits, logits after truncation, the largest logit).
    law: (1 / temperature, scale of the noise, key, position), by row.
    drawn: (tokens, log-probabilities, whether sampling.py must draw), by row; written.
    """
    logits, kept, largest = rows
    inverse, scale, keys, positions = law
    tokens, logprobs, unsure = drawn
    words = np.empty(CHUNK, np.uint32)
    for row in range(first, end):
        unsure[row] = not np.isfinite(largest[row])
        if unsure[row]:
            continue
        token, margin = _draw_row(
            kept[row], largest[row], (inverse[row], scale[row], keys[row], positions[row]), words
        )
        tokens[row] = token
        logprobs[row], total = _logprob(logits[row], token, inverse[row], largest[row])
        is_clear = margin > _F32(2.0**-18) + _F32(2.0**-21) * abs(largest[row])
        unsure[row] = not is_clear or not math.isfinite(total)


@njit(nogil=True, cache=True)
def _logprob_rows(first, end, logits, largest, inverse, tokens, logprobs):  # type: ignore
    for row in range(first, end):
        logprobs[row], _ = _logprob(logits[row], tokens[row], inverse[row], largest[row])


@njit(nogil=True, cache=True)
def _logprob(logits, token, inverse, largest):  # type: ignore
    """(log-probability, Σ exp(logit - largest))."""
    total = 0.0
    for start in range(0, logits.shape[0], CHUNK):
        total += _sum_of_exp(logits[start : start + CHUNK], inverse, largest)
    return logits[token] * inverse - (largest + _F32(math.log(total))), total


@njit(nogil=True, cache=True)
def _draw_row(kept, largest, law, words):  # type: ignore
    """Returns the best token, the first of equals, and its lead over the second best; inf if greedy."""
    inverse, scale, key, position = law
    if scale == _F32(0):
        for token in range(kept.shape[0]):
            if kept[token] * inverse == largest:
                return token, _F32(np.inf)
    slack = _F32(2.0**-10) + _F32(2.0**-20) * abs(largest)  # of bounds in float32
    best, second, token = _F32(-np.inf), _F32(-np.inf), 0
    needed = largest + _LEAST_NOISE - slack
    for start in range(0, kept.shape[0], CHUNK):
        part = kept[start : start + CHUNK]
        _philox_words(start // 4, key, position, words)
        if not _can_win(part, inverse, words, needed):
            continue
        for i in range(part.shape[0]):
            scaled = part[i] * inverse
            if scaled + _most_noise(words[i]) < needed:
                continue
            score = scaled + _gumbel(words[i])
            if score > best:
                best, second, token = score, best, start + i
                needed = max(needed, best - slack)
            elif score > second:
                second = score
    return token, best - second


@njit(nogil=True, cache=True, fastmath=_UNCHECKED)
def _can_win(logits, inverse, words, needed):  # type: ignore
    num = _I32(0)
    for i in range(logits.shape[0]):
        num += _I32(logits[i] * inverse + _most_noise(words[i]) >= needed)
    return num


@njit(nogil=True, cache=True, fastmath=REORDERED)
def _sum_of_exp(logits, inverse, largest):  # type: ignore
    total = _F32(0)
    for i in range(logits.shape[0]):
        total += exp_of(logits[i] * inverse - largest)
    return total


@njit(nogil=True, cache=True)
def _noise_rows(first, end, keys, positions, token_ids, noise):  # type: ignore
    words = np.empty(CHUNK, np.uint32)
    for row in range(first, end):
        for start in range(0, noise.shape[1], CHUNK):
            near_noise(start, token_ids, keys[row], positions[row], words, noise[row, start : start + CHUNK])


@njit(nogil=True, cache=True)
def near_noise(start, token_ids, key, position, words, noise):  # type: ignore
    """Writes the noise of tokens start …, or of token_ids[start:], within 2⁻¹⁹. words: room for CHUNK."""
    if token_ids.shape[0]:
        _words_of(token_ids[start : start + noise.shape[0]], key, position, words)
    else:
        _philox_words(start // 4, key, position, words)
    _near_noise_of_words(words, noise)


@njit(nogil=True, cache=True)
def _words_of(token_ids, key, position, words):  # type: ignore
    k0, k1, k2, k3 = key
    for i in range(token_ids.shape[0]):
        token = _U32(token_ids[i])
        r0, r1, r2, r3 = _philox(token >> _U32(2), position, k2, k3, k0, k1)
        is_odd, is_high = token & _U32(1), token & _U32(2)
        low, high = (r1, r3) if is_odd else (r0, r2)
        words[i] = high if is_high else low


@njit(nogil=True, cache=True)
def _noise_of_tokens(keys, positions, tokens, noise):  # type: ignore
    word = np.empty(1, np.uint32)
    for i in range(tokens.shape[0]):
        _words_of(tokens[i : i + 1], keys[i], positions[i], word)
        noise[i] = _gumbel(word[0])


@njit(nogil=True, cache=True, fastmath=_UNCHECKED, error_model="numpy")
def _near_noise_of_words(words, noise):  # type: ignore
    for i in range(noise.shape[0]):
        w = (_F32(words[i]) + _F32(0.5)) * _TO_UNIT
        complement = (_F32(_U32(~words[i])) + _F32(0.5)) * _TO_UNIT
        power, rest = _powers_of_two(complement)
        exponential = -_log(power, -w if power == _I32(0) else rest)  # 1 - w has lost the digits of a small w
        power, rest = _powers_of_two(exponential)
        noise[i] = -_log(power, rest)


# ── one token ───────────────────────────────────────────────────────────────────────────────────────────────


@njit(inline="always")
def _philox(x0, x1, x2, x3, a, b):  # type: ignore
    for _ in range(10):
        p0, p1 = _MULTIPLIER_0 * _U64(x0), _MULTIPLIER_1 * _U64(x2)
        x0, x1, x2, x3 = _U32(p1 >> _U64(32)) ^ x1 ^ a, _U32(p1), _U32(p0 >> _U64(32)) ^ x3 ^ b, _U32(p0)
        a, b = _U32(a + _WEYL_0), _U32(b + _WEYL_1)
    return x0, x1, x2, x3


@njit(nogil=True, cache=True)
def _philox_words(first_block, key, position, words):  # type: ignore
    k0, k1, k2, k3 = key
    for block in range(words.shape[0] // 4):
        r0, r1, r2, r3 = _philox(_U32(first_block + block), position, k2, k3, k0, k1)
        words[4 * block], words[4 * block + 1], words[4 * block + 2], words[4 * block + 3] = r0, r1, r2, r3


@njit(inline="always")
def _most_noise(word):  # type: ignore
    """An upper bound of the noise: (32 - exponent of word + ½) ln 2."""
    exponent = _I32(_I32(_F32(_F32(word) + _F32(0.5)).view(np.int32)) >> _I32(23))
    return _F32(_I32(_I32(32 + 127) - exponent)) * _LN2


@njit(inline="always")
def _gumbel(word):  # type: ignore
    uniform = (np.float64(word) + 0.5) * 2.0**-32
    return _F32(-math.log(-math.log1p(-uniform)))


@njit(inline="always")
def _powers_of_two(x):  # type: ignore
    """Returns k and f such that x = 2ᵏ (1 + f), √½ ≤ 1 + f < √2, for x > 0."""
    bits = np.float32(x).view(np.int32)
    power = _I32(_I32(bits - _SQRT_HALF_BITS) >> _I32(23))
    return power, _I32(bits - _I32(power << _I32(23))).view(np.float32) - _F32(1)


@njit(inline="always")
def _log(power, f):  # type: ignore
    """Returns log(2ᵏ (1 + f)) = k ln 2 + 2 artanh(s), s = f / (2 + f), as a series."""
    s = f / (_F32(2) + f)
    z = s * s
    series = _F32(1 / 9)
    series = series * z + _F32(1 / 7)
    series = series * z + _F32(1 / 5)
    series = series * z + _F32(1 / 3)
    return _F32(power) * _LN2 + (_F32(2) * s + _F32(2) * s * z * series)

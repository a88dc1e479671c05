"""Draws by the law, row by row, choosing the implementation by device.

on a CPU    compiled loops (compiled.py); sampling.py for float64, and where Numba is missing
on a GPU    the kernel (fused.py)
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from tlt.speculation.law import sampling
from tlt.speculation.law.params import BatchParams, Law
from tlt.speculation.law.sampling import VALUES_PER_PART, gumbel_noise, kernels, sample

NOISE_BYTES = 1 << 28
"""Most memory for noise in `draw_by_definition`, 28 bytes per value."""


@cache
def compiled_loops() -> ModuleType | None:
    """None without Numba: sampling.py draws, at large vocabularies thirty times slower."""
    try:
        from tlt.speculation.law import compiled
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return None
    compiled.load()
    return compiled


def draw(logits_RV: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """Returns (tokens, int64[R]; log-probabilities, [R]), as `sample` defines them."""
    loops = compiled_loops() if logits_RV.device.type == "cpu" and logits_RV.dtype != torch.float64 else None
    if loops is None:
        return _in_parts(logits_RV, law)
    tokens_R, logprobs_R, unsure = loops.draw(logits_RV, law)
    if unsure.numel():
        logits_UV, law_U = logits_RV[unsure], law.take(unsure)
        tokens_U, slow_U = _in_parts(logits_UV, law_U)
        fast_U = loops.logprobs(logits_UV, tokens_U, law_U.params)  # as of all other rows, where it is finite
        tokens_R[unsure], logprobs_R[unsure] = tokens_U, torch.where(fast_U.isfinite(), fast_U, slow_U)
    return tokens_R, logprobs_R


def logprobs(logits_RV: Tensor, tokens_R: Tensor, params: BatchParams) -> Tensor:
    """[R], of given tokens, to the bit as `draw` returns them."""
    if logits_RV.device.type == "cpu" and logits_RV.dtype != torch.float64 and (loops := compiled_loops()):
        logprobs_R: Tensor = loops.logprobs(logits_RV, tokens_R, params)
        return logprobs_R
    scaled_RV = params.scale(logits_RV[:, None])[:, 0]
    return scaled_RV.gather(-1, tokens_R[:, None])[:, 0] - scaled_RV.logsumexp(-1)


def noise_to_rank_with(
    keys_R4: Tensor, positions_R: Tensor, vocab_size: int, token_ids_V: Tensor | None = None
) -> Tensor:
    """Noise within 2⁻¹⁹ of the law's, float32[R, V], of all tokens or `token_ids_V`, for ranking drafts."""
    if keys_R4.device.type == "cpu" and (loops := compiled_loops()) is not None:
        noise_RV: Tensor = loops.noise_to_rank_with(keys_R4, positions_R, vocab_size, token_ids_V)
        return noise_RV
    noise_RV = gumbel_noise(keys_R4, positions_R[:, None], vocab_size)[:, 0]
    return noise_RV if token_ids_V is None else noise_RV[:, token_ids_V]


def noise_of_level(law: Law, vocab_size: int, level: int, token_ids_V: Tensor | None = None) -> Tensor:
    """As `noise_to_rank_with`, `level` positions after the law's; 0 for greedy sequences."""
    keys_B4, starts_B, params = law
    noise_BV = noise_to_rank_with(keys_B4, starts_B + level, vocab_size, token_ids_V)
    return noise_BV if params.noise_scale_B11 is None else noise_BV * params.noise_scale_B11[:, 0].float()


def noise_of_tokens(keys_K4: Tensor, positions_K: Tensor, tokens_K: Tensor) -> Tensor:
    """For CPU tensors."""
    noise_K: Tensor = (compiled_loops() or sampling).noise_of_tokens(keys_K4, positions_K, tokens_K)
    return noise_K


def _in_parts(logits_RV: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits_RV.shape
    draw_part, per_part = draw_by_definition, NOISE_BYTES // (28 * vocab_size)
    if logits_RV.is_cuda:
        draw_part, per_part = kernels().draw, num_rows
        if law.params.truncates:
            per_part = VALUES_PER_PART // vocab_size
    step = max(per_part, 1)
    bounds = [(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]
    parts = [draw_part(logits_RV[i:j], law.rows(i, j)) for i, j in bounds]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def draw_by_definition(logits_RV: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    noise_R1V = gumbel_noise(law.keys_R4, law.positions_R[:, None], logits_RV.shape[1])
    tokens_R1, logprobs_R1 = sample(logits_RV[:, None], noise_R1V, law.params)
    return tokens_R1[:, 0], logprobs_R1[:, 0]

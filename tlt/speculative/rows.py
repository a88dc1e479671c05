"""The law at rows that stand for themselves: each has logits, a key and a position. So noise need not be
anywhere in memory.

    on a CPU    compiled loops (compiled.py); the reference (sampling.py) for float64, and where Numba is missing
    on a GPU    the kernel (fused.py)

It serves engines that hand logits over in an order of their own. Knows no sequence and no tree.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from tlt.speculative import sampling
from tlt.speculative.params import BatchParams
from tlt.speculative.sampling import VALUES_PER_PART, gumbel_noise, kernels, sample

ROW_BYTES = 1 << 28
"""Memory for the noise of the rows that the reference draws at a time; a value takes 28 bytes while it is
made."""


@cache
def compiled_loops() -> ModuleType | None:
    """Returns compiled.py, which CPUs draw with; None where Numba, which compiles it, is missing: the
    reference then draws, thirty times slower at large vocabularies."""
    try:
        from tlt.speculative import compiled
    except ImportError:
        return None
    compiled.load()
    return compiled


def draw(
    logits_RV: Tensor, keys_R4: Tensor, positions_R: Tensor, params: BatchParams
) -> tuple[Tensor, Tensor]:
    """Returns (tokens, int64[R]; log-probabilities, [R]) as `sample` draws them: of row r with keys_R4[r] at
    positions_R[r].

    params: of R rows.
    """
    loops = compiled_loops() if logits_RV.device.type == "cpu" and logits_RV.dtype != torch.float64 else None
    if loops is None:
        return _in_parts(logits_RV, keys_R4, positions_R, params)
    tokens_R, logprobs_R, unsure_R = loops.draw(logits_RV, keys_R4, positions_R, params)
    if bool(unsure_R.any()):
        rows = unsure_R.nonzero()[:, 0]
        drawn = _in_parts(logits_RV[rows], keys_R4[rows], positions_R[rows], params.take(rows))
        tokens_R[rows], logprobs_R[rows] = drawn
    return tokens_R, logprobs_R


def noise_to_rank_with(
    keys_R4: Tensor, positions_R: Tensor, vocab_size: int, token_ids_V: Tensor | None = None
) -> Tensor:
    """Returns the noise of row r's position as float32[R, V], nearly the law's: whoever drafts may rank
    candidates with it.

    token_ids: of these tokens alone, in this order; None: of the whole vocabulary.
    """
    if keys_R4.device.type == "cpu" and (loops := compiled_loops()) is not None:
        noise_RV: Tensor = loops.noise_to_rank_with(keys_R4, positions_R, vocab_size, token_ids_V)
        return noise_RV
    noise_RV = gumbel_noise(keys_R4, positions_R[:, None], vocab_size)[:, 0]
    return noise_RV if token_ids_V is None else noise_RV[:, token_ids_V]


def noise_of_tokens(keys_K4: Tensor, positions_K: Tensor, tokens_K: Tensor) -> Tensor:
    """Returns `sampling.noise_of_tokens` of tensors on a CPU."""
    noise_K: Tensor = (compiled_loops() or sampling).noise_of_tokens(keys_K4, positions_K, tokens_K)
    return noise_K


def _in_parts(
    logits_RV: Tensor, keys_R4: Tensor, positions_R: Tensor, params: BatchParams
) -> tuple[Tensor, Tensor]:
    """Lets the kernel or the reference draw, so many rows at a time that memory is bounded."""
    num_rows, vocab_size = logits_RV.shape
    law, per_part = reference, ROW_BYTES // (28 * vocab_size)
    if logits_RV.is_cuda:
        law, per_part = kernels().draw, VALUES_PER_PART // vocab_size if params.truncates else num_rows
    bounds = [
        (first, min(first + max(per_part, 1), num_rows)) for first in range(0, num_rows, max(per_part, 1))
    ]
    parts = [law(logits_RV[i:j], keys_R4[i:j], positions_R[i:j], params.rows(i, j)) for i, j in bounds]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def reference(
    logits_RV: Tensor, keys_R4: Tensor, positions_R: Tensor, params: BatchParams
) -> tuple[Tensor, Tensor]:
    """The reference: noise whole, then the law."""
    noise_R1V = gumbel_noise(keys_R4, positions_R[:, None], logits_RV.shape[1])
    tokens_R1, logprobs_R1 = sample(logits_RV[:, None], noise_R1V, params)
    return tokens_R1[:, 0], logprobs_R1[:, 0]

"""The law at rows that stand for themselves: each has logits, a key and a position. It serves engines that hand logits over in
an order of their own, and vocabularies so large that noise must not be whole in memory. Knows no sequence and no tree."""

from __future__ import annotations

import torch
from torch import Tensor

from tlt.speculative.sampling import BatchParams, gumbel_noise, sample

ROW_BYTES = 1 << 28
"""Memory for the noise of the rows that are drawn at a time; a value takes 28 bytes while it is made."""


def draw(
    logits_RV: Tensor, keys_R4: Tensor, positions_R: Tensor, params: BatchParams, noise_RV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (tokens, int64[R]; log-probabilities, [R]) as `sample` draws them: of row r with keys_R4[r] at positions_R[r].

    params: of R rows.  noise_RV: the rows' noise, where it is known already.
    """
    if noise_RV is not None:
        tokens_R1, logprobs_R1 = sample(logits_RV[:, None], noise_RV[:, None], params)
        return tokens_R1[:, 0], logprobs_R1[:, 0]
    num_rows, vocab_size = logits_RV.shape
    per_part = max(ROW_BYTES // (28 * vocab_size), 1)
    tokens, logprobs = [], []
    for first in range(0, num_rows, per_part):
        end = min(first + per_part, num_rows)
        noise_R1V = gumbel_noise(keys_R4[first:end], positions_R[first:end, None], vocab_size)
        part = sample(logits_RV[first:end, None], noise_R1V, params.rows(first, end))
        tokens.append(part[0][:, 0])
        logprobs.append(part[1][:, 0])
    return torch.cat(tokens), torch.cat(logprobs)

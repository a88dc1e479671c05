"""The law at rows that stand for themselves: each has logits, a key and a position. It serves engines that hand logits over in
an order of their own, and vocabularies so large that noise must not be whole in memory. Knows no sequence and no tree.

    on a CPU    a part of the rows at a time: noise is made, then sampled with           on a GPU    the kernel (fused.py)
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt.speculative.sampling import VALUES_PER_PART, BatchParams, gumbel_noise, kernels, sample

ROW_BYTES = 1 << 28
"""Memory for the noise of the rows that are drawn at a time on a CPU; a value takes 28 bytes while it is made."""


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
    law, per_part = _plain, ROW_BYTES // (28 * vocab_size)
    if logits_RV.is_cuda:
        law, per_part = kernels().draw, VALUES_PER_PART // vocab_size if params.truncates else num_rows
    bounds = [(first, min(first + max(per_part, 1), num_rows)) for first in range(0, num_rows, max(per_part, 1))]
    parts = [law(logits_RV[i:j], keys_R4[i:j], positions_R[i:j], params.rows(i, j)) for i, j in bounds]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _plain(logits_RV: Tensor, keys_R4: Tensor, positions_R: Tensor, params: BatchParams) -> tuple[Tensor, Tensor]:
    """The reference: noise whole, then the law."""
    noise_R1V = gumbel_noise(keys_R4, positions_R[:, None], logits_RV.shape[1])
    return draw(logits_RV, keys_R4, positions_R, params, noise_R1V[:, 0])

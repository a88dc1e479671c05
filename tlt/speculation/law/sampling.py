"""The sampling law: which token follows, as a pure function of logits and a key.

    y(n) = argmax_v [ log p_n(v) + Gumbel(key, n, v) ]
    p_n: logits → temperature → top-k → top-p → min-p → softmax

Why the argmax is a sample: G = -log E with E exponential, so log p + G = -log(E / p), and E / p is when an
exponential clock of rate p rings. The argmax is the first clock to ring; its chance is proportional to its
rate. Noise depends on (key, absolute position n, token id v) alone, so any engine, batch, draft tree or
restart draws the same token. Ties go to the lowest token id; temperature 0 is plain argmax. Coupling of
drafter and target: Daliri, Musco and Suresh (arXiv 2408.07978).

This file defines the law. Engines draw by draw.py, which is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tlt.base.types import UserError
from tlt.base.uploads import upload
from tlt.speculation.law.params import BatchParams, truncate

VALUES_PER_PART = 1 << 24
"""Logits sampled at a time: truncation sorts 60 bytes each, 1 GiB."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., SC'11, "Parallel random numbers: as easy as 1, 2, 3").

    Words are int64 tensors of values below 2³², broadcast against each other. A product may wrap int64; its
    halves are still right, because the arithmetic shift is masked.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(_ROUNDS):
        if round_index:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
    return c0, c1, c2, c3


def gumbel_noise(keys_B4: Tensor, positions_BT: Tensor, vocab_size: int) -> Tensor:
    """Returns Gumbel(key, n, v) as float32[B, T, V]. Positions are below 2³².

    One Philox block yields the noise of four neighbouring tokens: counter (v // 4, n, key 2, key 3), key (key
    0, key 1). A 32-bit word r becomes w = (r + ½) / 2³², E = -log1p(-w), G = -log E, in float64, rounded
    once. The largest value is 22.9; exceeding it has probability 2⁻³³.
    """
    if keys_B4.is_cuda:
        noise_BTV: Tensor = kernels().gumbel_noise(keys_B4, positions_BT, vocab_size)
        return noise_BTV
    blocks = torch.arange((vocab_size + 3) // 4, device=keys_B4.device)
    k0, k1, k2, k3 = (keys_B4[:, i, None, None] for i in range(4))
    words = philox((blocks, positions_BT[:, :, None], k2, k3), (k0, k1))
    return _gumbel(torch.stack(words, dim=-1).flatten(-2)[..., :vocab_size])


def noise_of_tokens(keys_K4: Tensor, positions_K: Tensor, tokens_K: Tensor) -> Tensor:
    """Returns Gumbel(keys_K4[k], positions_K[k], tokens_K[k]) as float32[K]."""
    words = philox((tokens_K // 4, positions_K, keys_K4[:, 2], keys_K4[:, 3]), (keys_K4[:, 0], keys_K4[:, 1]))
    return _gumbel(torch.stack(words, dim=-1).gather(-1, tokens_K[:, None] % 4)[:, 0])


def _gumbel(words: Tensor) -> Tensor:
    uniform = (words.double() + 0.5) * 2.0**-32
    return torch.log1p(uniform.neg_()).neg_().log_().neg_().float()


def kernels() -> ModuleType:
    """Returns fused.py. Raises UserError without Triton."""
    try:
        from tlt.speculation.law import fused
    except ImportError as error:
        raise UserError(
            f"sampling on a GPU: {error}; install Triton (pip install triton), or run on the CPU"
        ) from error
    return fused


def keys_tensor(keys: Sequence[tuple[int, int, int, int]], device: torch.device | str = "cpu") -> Tensor:
    return upload(keys, device, torch.int64).view(-1, 4)


def sample(logits_BNV: Tensor, noise_BNV: Tensor, params: BatchParams) -> tuple[Tensor, Tensor]:
    """Returns (tokens_BN int64, logprobs_BN) by the law.

    Log-probabilities are log-softmax(logits / temperature) of the drawn tokens, before truncation.
    """
    per_part = max(VALUES_PER_PART // logits_BNV[0].numel(), 1)  # sequences
    if len(logits_BNV) <= per_part:
        return _sample(logits_BNV, noise_BNV, params)
    firsts = range(0, len(logits_BNV), per_part)
    parts = [
        (logits_BNV[i : i + per_part], noise_BNV[i : i + per_part], params.rows(i, i + per_part))
        for i in firsts
    ]
    tokens, logprobs = zip(*(_sample(*part) for part in parts), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample(logits_BNV: Tensor, noise_BNV: Tensor, params: BatchParams) -> tuple[Tensor, Tensor]:
    scaled_BNV = params.scale(logits_BNV)
    kept_BNV = truncate(scaled_BNV, params) if params.truncates else scaled_BNV
    if params.noise_scale_B11 is not None:
        noise_BNV = noise_BNV * params.noise_scale_B11.to(noise_BNV.dtype)
    # log p is the scaled logits minus one number per node, their logsumexp: the argmax is the same
    tokens_BN = (kept_BNV + noise_BNV).argmax(dim=-1)
    chosen_BN = scaled_BNV.gather(-1, tokens_BN[..., None])[..., 0]
    return tokens_BN, chosen_BN - scaled_BNV.logsumexp(dim=-1)

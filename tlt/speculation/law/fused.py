"""The law as a kernel, for GPUs: noise is computed in registers, so a row takes no memory but its logits.

    logits [R, V] ─▶ one program for every row and block of the vocabulary
                       Philox ─▶ Gumbel noise ─▶ + logits / T ─▶ the best score and token: 12 bytes a block
                  ─▶ the token of the row's best block ─▶ its log-probability (fused_logprobs.py)

1 - w has 33 bits, exact in float64, so -log(-log(1 - w)) needs no log1p. CUDA's float64 logarithm may differ
in the last bit, which changes the float32 noise of one word in millions: by a unit or, near noise 0, by 2⁻⁵¹
(benchmarks/results/law-kernel.md). An fma is forbidden: it rounds once where the law rounds twice.

Log-probabilities differ from sampling.py's as those of compiled.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.speculation.law.fused_logprobs import chosen_logprobs
from tlt.speculation.law.params import Law, truncate

BLOCK = 2048
"""Values of a program: eight per thread do not spill registers."""

OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""`enable_fp_fusion` would turn logits / T + noise into an fma."""


def draw(logits_RV: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """As `draw.draw`. Memory per row: 12 bytes per BLOCK of logits; with truncation, 60 bytes per logit."""
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    (num_rows, vocab_size), params = logits_RV.shape, law.params
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    kept_RV = (
        truncate(params.scale(logits_RV[:, None]), params)[:, 0].contiguous() if params.truncates else None
    )
    dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    tokens_RK = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits_RV.device)
    best_RK = torch.empty(num_rows, num_blocks, dtype=dtype, device=logits_RV.device)
    columns = (params.inverse_temperature_B11, params.noise_scale_B11)
    inverse_R, noise_scale_R = (None if c is None else c.flatten() for c in columns)
    by_row = (law.keys_R4.contiguous(), law.positions_R.contiguous(), inverse_R, noise_scale_R)
    with torch.cuda.device_of(logits_RV):
        law_kernel[num_rows, num_blocks](
            logits_RV,
            kept_RV,
            by_row,
            tokens_RK,
            best_RK,
            logits_RV.stride(0),
            vocab_size,
            BLOCK=BLOCK,
            **OPTIONS,
        )
    tokens_R = tokens_RK.gather(1, best_RK.argmax(-1, keepdim=True))[:, 0]  # the first of equal ones
    return tokens_R, chosen_logprobs(logits_RV, tokens_R, inverse_R)


def gumbel_noise(keys_B4: Tensor, positions_BT: Tensor, vocab_size: int) -> Tensor:
    noise_BTV = torch.empty(*positions_BT.shape, vocab_size, dtype=torch.float32, device=keys_B4.device)
    num_keys, num_positions = positions_BT.shape
    grid = (num_keys * num_positions, triton.cdiv(vocab_size, BLOCK))
    with torch.cuda.device_of(keys_B4):
        noise_kernel[grid](
            noise_BTV,
            keys_B4.contiguous(),
            positions_BT.contiguous(),
            num_positions,
            vocab_size,
            BLOCK=BLOCK,
            **OPTIONS,
        )
    return noise_BTV


@triton.jit
def law_kernel(logits_ptr, kept_ptr, law, token_ptr, best_ptr, stride, vocab_size, BLOCK: tl.constexpr):
    """Writes a block's best token and its score. As for torch.argmax, a NaN wins."""
    key_ptr, position_ptr, inverse_ptr, scale_ptr = law
    dtype: tl.constexpr = best_ptr.dtype.element_ty
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    token = first + tl.arange(0, BLOCK)
    is_real = token < vocab_size
    logit = tl.load(logits_ptr + row * stride + token, is_real, -float("inf")).to(dtype)
    if inverse_ptr is not None:
        logit = logit * tl.load(inverse_ptr + row).to(dtype)
    noise = _gumbel(key_ptr + 4 * row, tl.load(position_ptr + row), first, BLOCK)
    if scale_ptr is not None:
        noise = noise * tl.load(scale_ptr + row).to(tl.float32)
    kept = logit
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + row * vocab_size + token, is_real, -float("inf"))
    score = kept + noise.to(dtype)
    best, index = tl.max(tl.where(score == score, score, float("inf")), 0, return_indices=True)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(token_ptr + out, first + index)
    tl.store(best_ptr + out, best)


@triton.jit
def noise_kernel(noise_ptr, key_ptr, position_ptr, num_positions, vocab_size, BLOCK: tl.constexpr):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    token = first + tl.arange(0, BLOCK)
    noise = _gumbel(key_ptr + 4 * (row // num_positions), tl.load(position_ptr + row), first, BLOCK)
    tl.store(noise_ptr + row * vocab_size + token, noise, token < vocab_size)


@triton.jit
def _gumbel(key_ptr, position, first, BLOCK: tl.constexpr):
    """One Philox block serves four neighbouring tokens."""
    block = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros_like(block)
    k0, k1 = tl.load(key_ptr).to(tl.uint32), tl.load(key_ptr + 1).to(tl.uint32)
    k2, k3 = tl.load(key_ptr + 2).to(tl.uint32), tl.load(key_ptr + 3).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox_impl(block, zero + position.to(tl.uint32), zero + k2, zero + k3, k0, k1)
    word = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    complement = (4294967295.5 - word.to(tl.float64)) * (1.0 / 4294967296.0)  # 1 - w, exactly
    return (-tl.log(-tl.log(complement))).to(tl.float32)

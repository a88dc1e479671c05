"""Rotary positions (Su et al., arXiv 2104.09864) and the ways in which models stretch them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    factor: float

    def stretch(self, frequencies_H: Tensor, theta: float) -> tuple[Tensor, float]:
        """Returns the frequencies, and a factor of all cosines and sines."""
        return frequencies_H / self.factor, 1.0


@dataclass(frozen=True)
class Llama3:
    """Stretches long wavelengths and interpolates the middle band (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def stretch(self, frequencies_H: Tensor, theta: float) -> tuple[Tensor, float]:
        turns_H = self.original_max_positions * frequencies_H / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept_H = ((turns_H - low) / (high - low)).clamp(0, 1)
        return frequencies_H * (kept_H + (1 - kept_H) / self.factor), 1.0


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071): frequencies of fewer than `beta_slow` turns within the original
    window are divided by `factor`, those of more than `beta_fast` turns are kept.

    attention_factor: of cosines and sines; None: the paper's 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def stretch(self, frequencies_H: Tensor, theta: float) -> tuple[Tensor, float]:
        half = len(frequencies_H)

        def dimension(turns: float) -> float:
            return half * math.log(self.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)

        first, last = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        last += 0.001 if first == last else 0.0  # a ramp, not a division by zero
        stretched_H = (
            (torch.arange(half, dtype=torch.float64, device="cpu") - first) / (last - first)
        ).clamp(0, 1)
        usual = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        frequencies_H = frequencies_H * (1 - stretched_H + stretched_H / self.factor)
        return frequencies_H, usual if self.attention_factor is None else self.attention_factor


Scaling = LinearScaling | Llama3 | Yarn


class RopeConfig(Protocol):
    @property
    def head_dim(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> Scaling | None: ...
    @property
    def max_positions(self) -> int: ...


def rope_frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Returns (float64[D/2], factor of cosines and sines)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu") / config.head_dim
    frequencies_H = config.rope_theta**-exponents
    if config.rope_scaling is None:
        return frequencies_H, 1.0
    return config.rope_scaling.stretch(frequencies_H, config.rope_theta)


MOST_TABLED = 2**15
"""Longest window with tables: for a million positions they take a gigabyte and seconds."""


class Rope:
    """Cosines and signed sines of positions: rotate(x) = x·cos + roll(x, D/2)·sin."""

    def __init__(self, config: RopeConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.frequencies_H, self.factor = rope_frequencies(config)
        self.table: tuple[Tensor, Tensor] | None = None
        if config.max_positions <= MOST_TABLED:
            cos_P1D, sin_P1D = self._compute(torch.arange(config.max_positions, device="cpu"))
            self.table = cos_P1D.to(device), sin_P1D.to(device)
        else:
            self.frequencies_H = self.frequencies_H.to(device)

    def at(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        if self.table is None:
            return self._compute(positions_N)
        cos_P1D, sin_P1D = self.table
        return cos_P1D[positions_N], sin_P1D[positions_N]

    def _compute(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        angles_NH = torch.outer(positions_N.double(), self.frequencies_H)
        cos_NH, sin_NH = self.factor * angles_NH.cos(), self.factor * angles_NH.sin()
        halves = [cos_NH] * 2, [-sin_NH, sin_NH]
        cos_N1D, sin_N1D = (torch.cat(parts, dim=-1)[:, None].to(self.dtype) for parts in halves)
        return cos_N1D, sin_N1D

    @staticmethod
    def matching(x: Tensor, config: RopeConfig, known: Rope | None) -> Rope:
        if known is not None and (known.dtype, known.device) == (x.dtype, x.device):
            return known
        return Rope(config, x.dtype, x.device)


def apply_rope(qkv_NSD: Tensor, num_rotated: int, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Rotates the first heads, queries and keys; without autograd, in place."""
    qk = qkv_NSD[:, :num_rotated]
    rolled = qk.roll(qk.shape[-1] // 2, -1)
    if torch.is_grad_enabled():
        rotated = torch.addcmul(qk * cos_N1D, rolled, sin_N1D)
        return torch.cat([rotated, qkv_NSD[:, num_rotated:]], dim=1)
    torch.addcmul(qk * cos_N1D, rolled, sin_N1D, out=qk)
    return qkv_NSD

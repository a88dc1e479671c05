"""What the law draws by, row by row, and how sampling parameters change logits: temperature, then top-k,
top-p and min-p."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.base.types import SamplingParams
from tlt.base.uploads import upload

MAX_INVERSE_TEMPERATURE = 1e30
"""Keeps scaled logits within float32; distinct logits stay farther apart than any noise."""


class BatchParams(NamedTuple):
    """The sampling parameters of B sequences, float64 (top_k: int64).

    Temperature 0 is temperature 1 without noise.
    """

    inverse_temperature_B11: Tensor | None = None
    """None: all are 1."""
    noise_scale_B11: Tensor | None = None
    """0 for greedy sequences, else 1; None: none is greedy."""
    top_k_B11: Tensor | None = None
    """None, as then the next two: nothing is truncated."""
    top_p_B11: Tensor | None = None
    min_p_B11: Tensor | None = None

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> BatchParams:
        def column(values: list[float] | list[int]) -> Tensor:
            dtype = torch.float64 if isinstance(values[0], float) else torch.int64
            return upload(values, device, dtype)[:, None, None]

        temperatures = [p.temperature or 1.0 for p in params]
        inverse = [min(1.0 / t, MAX_INVERSE_TEMPERATURE) for t in temperatures]
        is_sampled = [float(p.temperature > 0) for p in params]
        columns = (
            None if all(t == 1.0 for t in temperatures) else column(inverse),
            None if all(is_sampled) else column(is_sampled),
        )
        if not any(p.truncates and p.temperature > 0 for p in params):
            return BatchParams(*columns)
        return BatchParams(
            *columns,
            column([p.top_k if p.top_k > 0 else torch.iinfo(torch.int64).max for p in params]),
            column([float(p.top_p) for p in params]),
            column([float(p.min_p) for p in params]),
        )

    @property
    def truncates(self) -> bool:
        return self.top_k_B11 is not None

    def rows(self, first: int, end: int) -> BatchParams:
        return self._map(lambda column: column[first:end])

    def take(self, sequences_R: Tensor) -> BatchParams:
        return self._map(lambda column: column[sequences_R])

    def repeat(self, num: int) -> BatchParams:
        """Each sequence `num` times."""
        return self._map(lambda column: column.repeat_interleave(num, dim=0))

    def _map(self, change: Callable[[Tensor], Tensor]) -> BatchParams:
        return BatchParams(*(None if column is None else change(column) for column in self))

    def scale(self, logits_BNV: Tensor) -> Tensor:
        logits_BNV = logits_BNV.float() if logits_BNV.dtype in (torch.bfloat16, torch.float16) else logits_BNV
        if self.inverse_temperature_B11 is None:
            return logits_BNV
        return logits_BNV * self.inverse_temperature_B11.to(logits_BNV.dtype)


class Law(NamedTuple):
    """What decides, beside the logits, the tokens of R rows.

    keys_R4: int64, the 32-bit words of the responses' noise keys.
    positions_R: int64, of the tokens to draw; below 2³².
    params: of R sequences.
    """

    keys_R4: Tensor
    positions_R: Tensor
    params: BatchParams

    def rows(self, first: int, end: int) -> Law:
        return Law(self.keys_R4[first:end], self.positions_R[first:end], self.params.rows(first, end))

    def take(self, rows_U: Tensor) -> Law:
        return Law(self.keys_R4[rows_U], self.positions_R[rows_U], self.params.take(rows_U))


def truncate(scaled_BNV: Tensor, params: BatchParams) -> Tensor:
    """Sets logits to -inf where top-k, then top-p, then min-p remove a token.

    Ties rank by token id. top-p keeps the shortest prefix whose mass, renormalized after top-k, reaches p.
    min-p is relative to the largest probability. The first token always stays.
    """
    _, _, top_k_B11, top_p_B11, min_p_B11 = params
    assert top_k_B11 is not None
    assert top_p_B11 is not None
    assert min_p_B11 is not None
    sorted_logits, order = scaled_BNV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled_BNV.shape[-1], device=scaled_BNV.device)
    removed = rank >= top_k_B11
    probabilities = sorted_logits.masked_fill(removed, float("-inf")).double().softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    removed = removed | ((mass_before >= top_p_B11) & (top_p_B11 < 1))
    removed |= probabilities < min_p_B11 * probabilities[..., :1]
    removed[..., 0] = False
    return scaled_BNV.masked_fill(torch.zeros_like(removed).scatter_(-1, order, removed), float("-inf"))

"""The engine's own numbers in the update: to the bit the log-probabilities with which a response was
generated, because a token's numbers depend on its own row alone.

    the engine's copy of the policy ── a packed batch, compiled ─▶ inputs of layers, features, logits, routes
                                                                     │ stand for
    the policy being trained ───────── the same batch, PyTorch ─▶ its own numbers, and have its derivatives

Axes: N tokens of a flat batch · T response tokens of it · E hidden size · V vocabulary ·
      R routers, K experts that a token takes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.base.types import SamplingParams
from tlt.models.loops import available
from tlt.models.target import Target
from tlt.speculation.law.draw import logprobs
from tlt.speculation.law.params import BatchParams

Families = Sequence[tuple[int, Sequence[int]]]
"""See `attention.SharedPrompts`."""


class Read(NamedTuple):
    """inputs: of the layers, and the features, each [N, E].
    routes: [N, R·K]; of a model without experts R is 0."""

    inputs: tuple[Tensor, ...]
    routes: Tensor


class EqualRows:
    """target: an engine's copy of the weights.
    params: with which the responses were drawn.
    load: loads weights that an optimizer step has changed.
    """

    def __init__(self, target: Target, params: SamplingParams, load: Callable[[], None]) -> None:
        self.target, self.load = target, load
        self.params = BatchParams.of([params])

    @torch.no_grad()
    def forward(self, tokens_N: Tensor, families: Families, every_layer: bool = True) -> Read:
        """Without `every_layer` the inputs are the features alone."""
        target, config, dtype = self.target, self.target.config, self.target.dtype
        loops = available.attention(dtype, target.device)
        assert loops is not None, "the preflight refuses what has no equal rows"
        num_columns = sum(prompt + num for prompt, own in families for num in own)
        cache = torch.empty(num_columns * 2 * config.num_kv_heads * config.head_dim, dtype=dtype)
        attend = loops.Packed(config, families, [cache] * config.num_layers, None)
        capture = range(config.num_layers + 1) if every_layer else (config.num_layers,)
        with target.recording(target.num_routes > 0):
            _, captured_NF = target.forward_capturing(tokens_N, attend.positions(), attend, tuple(capture))
        sizes = len(capture) * config.hidden_size, target.num_routes
        inputs_NF, routes_NF = captured_NF.split(sizes, dim=-1)
        return Read(inputs_NF.chunk(len(capture), dim=-1), routes_NF.long())

    @torch.no_grad()
    def logits(self, features_TE: Tensor) -> Tensor:
        """float32."""
        return self.target.logits(features_TE.to(self.target.dtype)).float()

    def logprobs(self, logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
        rows_T = torch.zeros(len(tokens_T), dtype=torch.int64)
        return logprobs(logits_TV, tokens_T, self.params.take(rows_T))

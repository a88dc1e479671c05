"""A chain of EAGLE's family in one call of compiled loops, for CPUs: no operation of PyTorch between its
levels, which for a small model takes longer than the arithmetic.

    missing pairs ─▶ layer ─▶ head ─▶ token ─▶ layer ─▶ head ─▶ token ─▶ …      (chain_stages.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.base import loops
from tlt.drafter.drafting.learned.chain_stages import DRAFT, NUM_COUNTED, compiled
from tlt.drafter.eagle import PackedEagle
from tlt.models.compiled_attention import CompiledAttention
from tlt.models.target import Target
from tlt.speculation.law.draw import LevelNoise
from tlt.speculation.law.tree import chain_mask


class Missing(NamedTuple):
    """Pairs that sequences have not read; every sequence misses its last.

    tokens: of the pairs, by sequence.
    features_NF: of all pairs, one sequence after the other.
    starts: cache column of each sequence's first.
    firsts: rotary position of column 0, by sequence.
    """

    tokens: Sequence[Sequence[int]]
    features_NF: Tensor
    starts: Sequence[int]
    firsts: Sequence[int]

    @property
    def counts(self) -> list[int]:
        return [len(row) for row in self.tokens]

    @property
    def ends(self) -> list[int]:
        return [start + len(row) for start, row in zip(self.starts, self.tokens, strict=True)]


class ChainLaw(NamedTuple):
    """tau: the coupling temperature."""

    noise: LevelNoise
    inverse_temperature_B11: Tensor | None
    tau: float


class CompiledChain:
    def __init__(self, model: PackedEagle, target: Target) -> None:
        self.model, self.target = model, target

    def can_draft(self) -> bool:
        """Whether the head of today's draft vocabulary is of panels."""
        embedding_VE, dtype = self.target.embedding_VE, self.model.dtype
        if self.model.compiled is None or self.model.head_panels(self.target) is None:
            return False
        return embedding_VE.dtype == dtype and embedding_VE.is_contiguous()

    def draft(
        self, missing: Missing, layers_SKLD: Sequence[Tensor], law: ChainLaw, depth: int
    ) -> tuple[Tensor, Tensor]:
        """(tokens [B, depth + 1], roots first; logits of level 0, [B, draft vocabulary])."""
        layer, counts, ends = self.model.compiled, missing.counts, missing.ends
        assert layer is not None
        B, N = len(counts), sum(counts)
        columns_BT = torch.tensor(missing.starts)[:, None] + torch.arange(max(counts))
        mask = None if max(counts) == 1 else chain_mask(columns_BT, max(ends), torch.float32)
        num_heads, rows = layer.config.num_heads, list(zip(counts, ends, strict=True))
        reading = CompiledAttention(num_heads, layers_SKLD, columns_BT, mask, rows, None)
        columns_B1, rows = torch.tensor(ends)[:, None], [(1, end + 1) for end in ends]
        drafting = CompiledAttention(num_heads, layers_SKLD, columns_B1, None, rows, None)
        arrays = self._weights() | self._buffers(N, B, depth) | _numbers_of(law)
        arrays |= {"features": missing.features_NF, "ends": np.array(ends), "last": np.cumsum(counts) - 1}
        arrays |= {"columns": drafting.columns, "rows": drafting.rows}
        arrays["new_tokens"] = torch.tensor([token for row in missing.tokens for token in row])
        arrays["tokens"][:, 0] = torch.tensor([row[-1] for row in missing.tokens])
        cos_PD, sin_PD = self._rope(missing, depth)
        counters = np.zeros((depth, NUM_COUNTED, 2), np.int64)
        given = {"x": arrays["x"], "cos": cos_PD, "sin": sin_PD, "counters": counters}
        if not self._is_eagle:
            given["read"] = arrays["pair"]
        num_threads = layer.num_threads(B, layer.num_weights + self._num_weights)
        call = layer.prepare(given, reading, num_threads)
        calls = arrays["calls"] = call.record.repeat(depth)
        calls["counters"] += counters.strides[0] * np.arange(depth)
        calls["num_tokens"][1:], calls["attention"][1:] = B, loops.address_of(drafting.call)
        for name in ("cos", "sin"):
            calls[name][1:] += cos_PD[0].nbytes * (N + B * np.arange(depth - 1))
        numbers = self._sizes(depth) | {"num_items": num_threads, "num_rows": B, "depth": depth}
        numbers |= {"captured": missing.features_NF.shape[1], "num_draft": self.model.num_proposed}
        record = loops.record(DRAFT, numbers | {"sharpness": 1 / law.tau}, arrays)
        loops.Loop(compiled(self.model.dtype), record, num_threads).run()
        del call  # it has held the arrays of the layer
        return arrays["tokens"], arrays["logits"][:, : self.model.num_proposed]

    @property
    def _is_eagle(self) -> bool:
        return self.model.config.method == "eagle"

    @property
    def _num_weights(self) -> int:
        """Of a level, beside the layer's."""
        E, fc_size = self.model.config.layer.hidden_size, self.model.config.fc_size
        return E * ((fc_size if self._is_eagle else 0) + self.model.num_proposed)

    def _sizes(self, depth: int) -> dict[str, int]:
        E, fc_size = self.model.config.layer.hidden_size, self.model.config.fc_size
        widths = (2 * E, E, depth) if self._is_eagle else (fc_size, 2 * E, 1)
        return {"fc_size": fc_size} | dict(
            zip(("fc_in_width", "fc_out_width", "fc_levels"), widths, strict=True)
        )

    def _weights(self) -> dict[str, Any]:
        model, head = self.model, self.model.head_panels(self.target)
        assert model.fc.panels is not None
        assert head is not None
        found = {"fc": model.fc.panels.weights, "head": head.weights, "embedding": self.target.embedding_VE}
        if model.fc.bias is not None:
            found["fc_bias"] = model.fc.bias.float()
        if model.config.norm_before_residual:
            found["stream_gains"] = model.layer.input_norms["hidden_norm"].weight.float()
        if model.config.has_norm:
            found["norm_gains"] = model.norm.weight.float()
        if model.token_ids is not None:
            found["token_ids"] = model.token_ids
        return found

    def _buffers(self, num_pairs: int, num_rows: int, depth: int) -> dict[str, Any]:
        """The logits of level 0 stay."""
        E, fc_size = self.model.config.layer.hidden_size, self.model.config.fc_size
        head = self.model.head_panels(self.target)
        assert head is not None
        pair_NI, x_NE = torch.empty(num_pairs, 2 * E), torch.empty(num_pairs, E)
        hidden_BE = torch.empty(num_rows, E)
        logits_2BV = torch.empty(2, num_rows, head.num_panels * head.weights.shape[2])
        return {
            "tokens": torch.empty(num_rows, depth + 1, dtype=torch.int64),
            "pair": pair_NI,
            "x": x_NE,
            "fc_in": pair_NI if self._is_eagle else torch.empty(num_pairs, fc_size),
            "fc_out": x_NE if self._is_eagle else pair_NI[:, E:],
            "hidden": hidden_BE,
            "outputs": torch.empty(num_rows, E) if self.model.config.has_norm else hidden_BE,
            "logits": logits_2BV[0],
            "later_logits": logits_2BV[1],
        }

    def _rope(self, missing: Missing, depth: int) -> tuple[Tensor, Tensor]:
        """Of the missing pairs, then of those of the other levels, level by level."""
        begins = zip(missing.starts, missing.counts, missing.firsts, strict=True)
        positions = [first + start + i for start, count, first in begins for i in range(count)]
        ends = [end + first for end, first in zip(missing.ends, missing.firsts, strict=True)]
        positions += [end + level for level in range(depth - 1) for end in ends]
        last = self.model.config.layer.max_positions - 1
        cos_P1D, sin_P1D = self.model.rope.at(torch.tensor(positions).clamp_max(last))
        return cos_P1D.flatten(1).float(), sin_P1D.flatten(1).float()


def _numbers_of(law: ChainLaw) -> dict[str, Any]:
    noise = law.noise
    found = {"keys": noise.keys_B4.numpy().astype(np.uint32), "positions": noise.starts_B}
    if law.inverse_temperature_B11 is not None:
        found["inverse_temperatures"] = law.inverse_temperature_B11.flatten().float()
    if noise.scale_B11 is not None:
        found["noise_scales"] = noise.scale_B11.flatten().float()
    return found

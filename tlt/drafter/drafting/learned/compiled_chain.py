"""A chain of EAGLE's family in one call of compiled loops: for a small model, PyTorch's operations take
longer than the arithmetic.

    missing pairs ─▶ layer ─▶ head ─▶ token ─▶ layer ─▶ head ─▶ token ─▶ …      (chain_stages.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import add
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.base import loops
from tlt.drafter.drafting.learned.chain_stages import DRAFT, NUM_COUNTED, SEQUENCE, compiled
from tlt.drafter.drafting.learned.feature_history import FeatureHistory
from tlt.drafter.eagle import PackedEagle
from tlt.models.loops.attention import CompiledAttention, Heads, Places, rows_of_cache
from tlt.models.loops.layers import CompiledLayers
from tlt.models.target import Target
from tlt.speculation.law.params import Law


class Missing(NamedTuple):
    """Pairs that the sequences in slots 0, 1, … have not read; every sequence misses its last.

    starts: cache column of each sequence's first.
    firsts: position of column 0, by sequence.
    """

    tokens: Sequence[Sequence[int]]
    starts: Sequence[int]
    firsts: Sequence[int]
    layers: Sequence[Tensor]
    history: FeatureHistory


class CompiledChain:
    def __init__(self, model: PackedEagle, target: Target, layer: CompiledLayers) -> None:
        self.model, self.target, self.layer = model, target, layer

    def can_draft(self) -> bool:
        embedding_VE, dtype = self.target.embedding_VE, self.model.dtype
        has_panels = self.model.head_panels(self.target) is not None
        return has_panels and embedding_VE.dtype == dtype and embedding_VE.is_contiguous()

    def draft(self, missing: Missing, law: Law, tau: float, depth: int) -> tuple[Tensor, Tensor]:
        """Returns tokens [B, depth + 1], roots first, and logits of level 0, [B, draft vocabulary]."""
        counts, history, layer = [len(row) for row in missing.tokens], missing.history, self.layer
        B, N = len(counts), sum(counts)
        reading, drafting = _attention(missing, counts, layer.config)
        history.flush()
        assert len(history.ring_SCF) >= B, "features of every sequence are kept"
        rotary, rope_at = self._rope(missing, counts, depth)
        offsets, positions = accumulate(counts, initial=0), map(add, missing.firsts, missing.starts)
        sequences = zip(offsets, counts, missing.starts, positions, rope_at, strict=False)
        packed = np.array([*chain.from_iterable(sequences), *chain.from_iterable(missing.tokens)])
        counters = np.zeros((depth, NUM_COUNTED, 2), np.int64)
        tokens_BN = torch.empty(B, depth + 1, dtype=torch.int64)
        tensors = self._weights() | rotary | _numbers_of(law)
        tensors |= {"ring": history.ring_SCF, "tokens": tokens_BN, "columns": drafting.columns}
        width = tensors["head"].shape[0] * tensors["head"].shape[2]
        logits_BV = tensors["logits"] = torch.empty(B, width)
        room, addresses = loops.room_for(self._sizes(N, B) | {"later_logits": B * width})
        addresses |= {name: tensor.data_ptr() for name, tensor in tensors.items()}
        fc = self._place_fc(addresses, depth)
        num_threads = layer.num_threads(B, layer.num_weights + self._num_weights)
        given = {name: addresses[name] for name in ("x", "cos", "sin")}
        given["read"] = 0 if self._is_eagle else addresses["pair"]
        call, layer_room = layer.prepare(N, given, reading, num_threads)
        calls = call.repeat(2)
        calls["num_tokens"][1], calls["attention"][1] = B, loops.address_of(drafting.call)
        numbers = {
            "num_items": num_threads,
            "calls": loops.address_of(calls),
            "counters": loops.address_of(counters),
            "sequences": loops.address_of(packed),
            "new_tokens": loops.address_of(packed) + packed.itemsize * B * len(SEQUENCE),
            "rows": loops.address_of(drafting.rows),
            "num_rows": B,
            "depth": depth,
            "num_columns": history.num_columns,
            "ring_columns": history.ring_SCF.shape[1],
            "captured": history.ring_SCF.shape[2],
            "head_dim": layer.config.head_dim,
            "num_rotary": len(rotary["cos_rows"]),
            "num_draft": self.model.num_proposed,
            "sharpness": 1 / tau,
        }
        record = loops.record(DRAFT, {**addresses, **fc, **numbers})
        loops.Loop(compiled(self.model.dtype), record, num_threads).run()
        del room, layer_room, reading  # which the records have pointed to
        return tokens_BN, logits_BV[:, : self.model.num_proposed]

    @property
    def _is_eagle(self) -> bool:
        return self.model.config.method == "eagle"

    @property
    def _num_weights(self) -> int:
        E, fc_size = self.model.config.layer.hidden_size, self.model.config.fc_size
        return E * ((fc_size if self._is_eagle else 0) + self.model.num_proposed)

    def _weights(self) -> dict[str, Tensor]:
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

    def _sizes(self, num_pairs: int, num_rows: int) -> dict[str, int]:
        E, dim = self.model.config.layer.hidden_size, self.model.config.layer.head_dim
        sizes = {"pair": 2 * E, "x": E, "cos": dim, "sin": dim}
        if not self._is_eagle:
            sizes["fc_in"] = self.model.config.fc_size
        outputs = ("hidden", "outputs") if self.model.config.has_norm else ("hidden",)
        by_pair = {name: num_pairs * size for name, size in sizes.items()}
        return by_pair | dict.fromkeys(outputs, num_rows * E)

    def _place_fc(self, addresses: dict[str, int], depth: int) -> dict[str, int]:
        E, fc_size = self.model.config.layer.hidden_size, self.model.config.fc_size
        into_pair = addresses["pair"] + 4 * E
        if self._is_eagle:
            places, widths = (addresses["pair"], addresses["x"]), (fc_size, E, depth)
        else:
            places, widths = (addresses["fc_in"], into_pair), (fc_size, 2 * E, 1)
        names = ("fc_in", "fc_out", "fc_in_width", "fc_out_width", "fc_levels")
        outputs = addresses.get("outputs", addresses["hidden"])
        return {"fc_size": fc_size, "outputs": outputs} | dict(zip(names, (*places, *widths), strict=True))

    def _rope(
        self, missing: Missing, counts: Sequence[int], depth: int
    ) -> tuple[dict[str, Tensor], list[int]]:
        begins, rope = list(map(add, missing.firsts, missing.starts)), self.model.rope
        if rope.table is not None:
            return dict(zip(("cos_rows", "sin_rows"), rope.table, strict=True)), begins
        lengths = [count + depth - 1 for count in counts]
        ranges = [torch.arange(at, at + length) for at, length in zip(begins, lengths, strict=True)]
        last = self.model.config.layer.max_positions - 1
        rows = rope.at(torch.cat(ranges).clamp_max(last))
        return dict(zip(("cos_rows", "sin_rows"), rows, strict=True)), list(accumulate(lengths, initial=0))


def _attention(
    missing: Missing, counts: Sequence[int], config: Heads
) -> tuple[CompiledAttention, CompiledAttention]:
    ends = list(map(add, missing.starts, counts))
    columns_BT = torch.from_numpy(np.add.outer(missing.starts, np.arange(max(counts))))
    rows = rows_of_cache(list(zip(counts, ends, strict=True)), max(counts))
    reading = CompiledAttention(config, missing.layers, rows, Places(columns_BT, is_causal=True))
    rows = rows_of_cache([(1, end + 1) for end in ends], 1)
    return reading, CompiledAttention(config, missing.layers, rows, Places(torch.tensor(ends)))


def _numbers_of(law: Law) -> dict[str, Tensor]:
    possible = {
        "keys": law.keys_R4,
        "positions": law.positions_R,
        "inverse_temperatures": law.params.inverse_temperature_B11,
        "noise_scales": law.params.noise_scale_B11,
    }
    return {name: tensor for name, tensor in possible.items() if tensor is not None}

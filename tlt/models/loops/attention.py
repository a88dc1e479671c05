"""Attention over a cache, in compiled loops for CPUs.

models/attention.py is the reference. To the last bit, a query's result does not depend on other queries,
other sequences or keys that it does not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tlt.base import loops
from tlt.models.loops.blocks import compiled_multiply
from tlt.models.loops.items import CALL, TOKENS_AT_ONCE, compiled

PRODUCTS_PER_THREAD = 100_000
"""Multiplications that justify another thread, which takes some microseconds to wake."""


class Heads(Protocol):
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class Form(Protocol):
    @property
    def scale(self) -> float | None: ...
    @property
    def window(self) -> int | None: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def sinks_H(self) -> Tensor | None: ...


class Places(NamedTuple):
    """columns, positions: of the tokens, int64; positions None: their columns.
    parents: of draft trees' nodes, int64[B, N], -1 at a root: a node sees what lies before its root, its
        ancestors and itself, whose keys count as if they stood in a chain.
    mask: [.., L], added to the scores.
    is_causal: whether a token sees the columns up to its own alone.
    """

    columns: Tensor
    positions: Tensor | None = None
    parents: Tensor | None = None
    mask: Tensor | None = None
    is_causal: bool = False


class CompiledAttention:
    """`attention.Cached`, and `attention.SharedPrompts` over a cache.

    layers: per layer, [slots, 2 × kv heads, length, head dim], or, without slots, [2 × kv heads × all columns
        × head dim].
    rows: see `items.ROW`.
    real_N: the tokens of the flat batch, in padded sequences; None: there is no padding.
    """

    def __init__(
        self,
        config: Heads,
        layers: Sequence[Tensor],
        rows: Rows,
        places: Places,
        real_N: Tensor | None = None,
    ) -> None:
        self.layers, self.real_N, self.num_heads = layers, real_N, config.num_heads
        self.num_kv_heads, self.dim = config.num_kv_heads, config.head_dim
        columns, positions, parents, mask, is_causal = places
        self.columns = columns.contiguous()
        self.token_positions = self.columns if positions is None else positions.contiguous()
        self.parents = None if parents is None else parents.contiguous()
        self.mask = None if mask is None else mask.float().contiguous()
        self.form: Form | None = None
        self.sinks: Tensor | None = None
        self.rows = np.array([*rows.queries, *rows.copies], np.int64)
        self.num_rows, self.has_slots = len(rows.queries), layers[0].dim() == 4
        counts, seen = self.rows[: self.num_rows, 1], self.rows[: self.num_rows, 2]
        self.longest = int(seen.max())
        stores_first = bool(rows.copies) or len(set(self.rows[:, 4])) < self.num_rows
        numbers: dict[str, float] = {
            "multiply": compiled_multiply(torch.float32),
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.dim,
            "capacity": layers[0].shape[2] if self.has_slots else 0,
            "most_new": counts.max(),
            "mask_length": 0 if self.mask is None else self.mask.shape[-1],
            "tree_size": 0 if self.parents is None else self.parents.shape[1],
            "num_rows": self.num_rows,
            "num_stored": len(self.rows) if stores_first else 0,
            "is_causal": is_causal,
            "scale": self.dim**-0.5,
        }
        tensors: dict[str, Tensor | None] = {"columns": self.columns, "positions": self.token_positions}
        tensors |= {"mask": self.mask, "parents": self.parents}
        numbers |= {name: t.data_ptr() for name, t in tensors.items() if t is not None}
        self.call = loops.record(CALL, numbers | {"rows": loops.address_of(self.rows)})
        num_products = 2 * int((counts * seen).sum()) * self.num_heads * self.dim
        self.max_threads = 1 + num_products // PRODUCTS_PER_THREAD

    def __call__(self, layer: int, qkv_NSD: Tensor, form: Form | None = None) -> Tensor:
        """form: None: plain attention."""
        if form is not self.form:
            self._set(form)
        if self.has_slots:
            self.call["capacity"] = capacity = self.layers[layer].shape[2]
            assert self.call["window"][0] or capacity >= self.longest, "a layer without a window keeps all"
        qkv_NSD = qkv_NSD.contiguous()
        out_NC = qkv_NSD.new_empty(len(qkv_NSD), self.num_heads * self.dim)
        self.call["qkv"], self.call["out"] = qkv_NSD.data_ptr(), out_NC.data_ptr()
        self.call["layer"] = self.layers[layer].data_ptr()
        if num_stored := int(self.call["num_stored"][0]):
            self._run(num_stored, is_storing=True)
        self._run(self.num_rows, is_storing=False)
        return out_NC

    def _run(self, num_rows: int, is_storing: bool) -> None:
        self.call["is_storing"], self.call["num_items"] = is_storing, num_rows * self.num_kv_heads
        loops.Loop(compiled(self.layers[0].dtype), self.call, self.max_threads).run()

    def _set(self, form: Form | None) -> None:
        self.form = form
        scale = window = softcap = sinks_H = None
        if form is not None:
            scale, window, softcap, sinks_H = form.scale, form.window, form.softcap, form.sinks_H
        self.sinks = None if sinks_H is None else sinks_H.detach().float().contiguous()
        self.call["sinks"] = 0 if self.sinks is None else self.sinks.data_ptr()
        self.call["window"], self.call["softcap"] = window or 0, softcap or 0.0
        self.call["scale"] = self.dim**-0.5 if scale is None else scale


class Packed(CompiledAttention):
    """See `attention.StoringPrefill`.

    slots: of the sequences; None: `layers` have no slots, and the sequences follow one another.
    """

    def __init__(
        self,
        config: Heads,
        families: Sequence[tuple[int, Sequence[int]]],
        layers: Sequence[Tensor],
        slots: Sequence[int] | None,
    ) -> None:
        lengths = [prompt + num_own for prompt, own in families for num_own in own or [0]]
        places = [(slot, 0) for slot in slots or ()]
        if slots is None:
            places = list(zip(accumulate([0, *lengths]), lengths, strict=False))
        rows, columns = _rows_of_families(families, iter(places))
        super().__init__(config, layers, rows, Places(torch.tensor(columns), is_causal=True))

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        return self.columns.to(device)


class Rows(NamedTuple):
    queries: list[tuple[int, ...]]
    copies: list[tuple[int, ...]]


def rows_of_cache(counts_and_seen: Sequence[tuple[int, int]], num_columns: int) -> Rows:
    """For sequences in slots 0, 1, …, by (new tokens, columns that they see). num_columns: entries of
    columns, positions and mask a sequence, of which the first are real."""
    queries: list[tuple[int, ...]] = []
    first = 0
    for slot, (count, seen) in enumerate(counts_and_seen):
        parts = _parts(count)
        queries += [(first + i, n, seen, slot * num_columns + i, slot, 0) for i, n in parts]
        first += count
    return Rows(queries, [])


def _rows_of_families(
    families: Sequence[tuple[int, Sequence[int]]], places: Iterator[tuple[int, int]]
) -> tuple[Rows, list[int]]:
    """places: (place, room) of each sequence. Also returns the flat batch's columns."""
    queries: list[tuple[int, ...]] = []
    copies: list[tuple[int, ...]] = []
    columns: list[int] = []
    for prompt, own in families:
        start = len(columns)  # of the prompt
        for index, num_own in enumerate(own or [0]):
            where, first = next(places), len(columns)
            columns += range(prompt if index else 0, prompt + num_own)
            for i, n in _parts(len(columns) - first):
                queries.append((first + i, n, columns[first + i + n - 1] + 1, first + i, *where))
            if index:
                copies += [(start + i, n, 0, start + i, *where) for i, n in _parts(prompt)]
    return Rows(queries, copies), columns


def _parts(count: int) -> Iterator[tuple[int, int]]:
    return ((i, min(TOKENS_AT_ONCE, count - i)) for i in range(0, count, TOKENS_AT_ONCE))

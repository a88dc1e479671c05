"""CUDA graphs: kernels launched again with the same shapes are recorded once, then launched together. A small
batch otherwise waits for the host's launches (benchmarks/results/gpu).

    run ─▶ eagerly, the first times ─▶ recorded, on tensors of its own ─▶ inputs in · replay · outputs out

A recording reads and writes the memory that its function saw, hence `keep_to`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

EAGER_RUNS = 2
"""Before a recording: they load kernels and choose products' algorithms, and shapes that do not return are
never recorded."""
MOST_GRAPHS = 96
MOST_TOKENS = 1024
"""Of a forward: with more, a GPU takes longer than the host."""

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Graph:
    inputs: Mapping[str, Tensor]
    outputs: Outputs
    replay: Callable[[], None]


class Graphs:
    """On a CPU, or with `is_on` False, functions run eagerly."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on = device.type == "cuda"
        self._memory: Hashable = None
        self.clear()

    def keep_to(self, memory: Hashable) -> None:
        """Clears the graphs where weights or caches have moved to other `memory`."""
        if memory != self._memory:
            self._memory = memory
            self.clear()

    def clear(self) -> None:
        self._seen = Counter[Hashable]()
        self._graphs: dict[Hashable, Graph] = {}
        self._pool: Any = None

    def run(
        self,
        key: Hashable,
        function: Callable[..., Outputs],
        inputs: Mapping[str, Tensor],
        most_rows: int | None = None,
    ) -> Outputs:
        """Returns function(**inputs). Inputs and outputs have a row per sequence.

        key: differs with everything else that the function reads and that changes.
        most_rows: rows may be added up to this number; None: none is.
        """
        if not self.is_on:
            return function(**inputs)
        (num_rows,) = {len(tensor) for tensor in inputs.values()}
        rows = num_rows if most_rows is None else min(padded_rows(num_rows), most_rows)
        widths = tuple((name, *tensor.shape[1:]) for name, tensor in inputs.items())
        key = (key, rows, widths)
        if (graph := self._graphs.get(key)) is None:
            self._seen[key] += 1
            if self._seen[key] <= EAGER_RUNS:
                return function(**inputs)
            if len(self._graphs) == MOST_GRAPHS:
                self.clear()
            graph = self._graphs[key] = self._record(function, inputs, rows)
        for name, tensor in inputs.items():
            graph.inputs[name][:num_rows].copy_(tensor)
        graph.replay()
        return tuple(output[:num_rows].clone() for output in graph.outputs)

    def _record(self, function: Callable[..., Outputs], inputs: Mapping[str, Tensor], rows: int) -> Graph:
        """Added rows are zeros until a larger batch has left its own there."""
        own = {name: tensor.new_zeros(rows, *tensor.shape[1:]) for name, tensor in inputs.items()}
        for name, tensor in inputs.items():
            own[name][: len(tensor)].copy_(tensor)
        outputs, replay, self._pool = record(function, own, self._pool, self.device)
        return Graph(own, outputs, replay)


def padded_rows(num_rows: int) -> int:
    return num_rows if num_rows <= 4 else -(-num_rows // 8) * 8 if num_rows <= 64 else -(-num_rows // 32) * 32


def padded_length(length: int) -> int:
    """At most a seventh longer: a sequence grows by some tokens a step."""
    step = max(64, 1 << max(length.bit_length() - 4, 0))
    return -(-length // step) * step


def record(
    function: Callable[..., Outputs], inputs: Mapping[str, Tensor], pool: Any, device: torch.device
) -> tuple[Outputs, Callable[[], None], Any]:
    """Returns the outputs, `replay`, which fills them, and the memory pool that graphs of one module
    share."""
    graph, stream, current = torch.cuda.CUDAGraph(), _stream(device), torch.cuda.current_stream(device)
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        # other threads of the process may allocate and copy meanwhile
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = function(**inputs)
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return outputs, graph.replay, pool


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

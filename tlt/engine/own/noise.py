"""The law of the running batch: values of its noise are computed where they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tlt.base.types import Request
from tlt.base.uploads import upload
from tlt.speculation.law.draw import noise_of_level, noise_of_tokens
from tlt.speculation.law.params import BatchParams, Law
from tlt.speculation.law.sampling import keys_tensor
from tlt.speculation.law.tree import TreeLayout


@dataclass(frozen=True)
class BatchLaw:
    """Built anew when the batch changes."""

    requests: tuple[Request, ...]
    params: BatchParams
    keys: tuple[tuple[int, int, int, int], ...]
    keys_B4: Tensor

    @staticmethod
    def of(requests: Sequence[Request], device: torch.device) -> BatchLaw:
        keys = tuple(request.noise_key for request in requests)
        params = BatchParams.of([request.params for request in requests], device)
        return BatchLaw(tuple(requests), params, keys, keys_tensor(keys, device))

    def of_nodes(self, nodes: TreeLayout, rows: Sequence[int], first: int, end: int) -> Law:
        """The law at the positions that follow the nodes in columns first .. end - 1 of these rows."""
        keys_B4, positions_BN, params = self.keys_B4, nodes.positions_BN[:, first:end] + 1, self.params
        if len(rows) < len(self.keys):
            taken = upload(rows, keys_B4.device)
            keys_B4, positions_BN, params = keys_B4[taken], positions_BN[taken], params.take(taken)
        if (num := end - first) > 1:
            keys_B4, params = keys_B4.repeat_interleave(num, dim=0), params.repeat(num)
        return Law(keys_B4, positions_BN.flatten(), params)


@dataclass(frozen=True)
class StepNoise:
    """The `DraftNoise` of a step."""

    batch: BatchLaw
    starts: Sequence[int]
    """Position that level 0 drafts for, by row."""
    vocab_size: int

    def of_level(self, level: int, token_ids_V: Tensor | None = None) -> Tensor:
        return noise_of_level(self.law, self.vocab_size, level, token_ids_V)

    @cached_property
    def law(self) -> Law:
        keys_B4 = self.batch.keys_B4
        return Law(keys_B4, upload(self.starts, keys_B4.device), self.batch.params)

    def of_tokens(self, places: Sequence[tuple[int, int, int]]) -> list[float]:
        keys_K4 = keys_tensor([self.batch.keys[row] for row, _, _ in places])
        positions_K = torch.tensor([self.starts[row] + level for row, level, _ in places])
        noise_K = noise_of_tokens(keys_K4, positions_K, torch.tensor([token for _, _, token in places]))
        is_greedy = [request.params.temperature == 0 for request in self.batch.requests]
        noise = zip(places, noise_K.tolist(), strict=True)
        return [0.0 if is_greedy[row] else value for (row, _, _), value in noise]

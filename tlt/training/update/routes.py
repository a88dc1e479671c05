"""Routes of experts in the update: replayed from the engine, counted, compared.

Axes: N tokens of a flat batch · R routers · K experts that a token takes · X experts of a layer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tlt.base.records import NAN
from tlt.models.decoder import Policy
from tlt.models.routing import Routing
from tlt.training.update.micro_batches import Experience


class Routes:
    """Of an update. A response with the routes of all its tokens is replayed."""

    def __init__(self, model: Policy, device: torch.device) -> None:
        self.shape = model.route_shape
        self.loads_RX = torch.zeros(self.shape[0], model.config.num_experts, dtype=torch.int64, device=device)
        self.compared = torch.zeros(2, dtype=torch.int64, device=device)
        """Experts that the engine took and the update's router would not; all that were compared."""

    def routing(
        self,
        batch: Sequence[Experience],
        families: Sequence[Sequence[int]],
        starts: Mapping[int, int],
        num_tokens: int,
    ) -> Routing:
        """starts: place of each response's first token in the flat batch, by index."""
        engine = {i: self._of_engine(response) for i, response in enumerate(batch)}
        replayed = {i: rows for i, rows in engine.items() if len(rows) == batch[i].length}
        if not replayed:
            return Routing()
        given_NRK = torch.full((num_tokens, *self.shape), -1)
        for family in families:
            for i in family:
                if (rows_TRK := replayed.get(i)) is not None:
                    num_prompt, place = batch[i].num_prompt, starts[i]
                    given_NRK[place : place + batch[i].num_own] = rows_TRK[num_prompt:]
                    if i == family[0]:
                        given_NRK[place - num_prompt : place] = rows_TRK[:num_prompt]
        return Routing(given_NRK.to(self.loads_RX.device))

    @torch.no_grad()
    def observe(self, batch: Sequence[Experience], starts: Mapping[int, int], found: Tensor) -> None:
        """Of the response's tokens that are read. Ranks' dummies have none. found: [N, R·K]."""
        found_NRK = found.view(-1, *self.shape)
        for i, response in enumerate(batch):
            own_TRK = found_NRK[starts[i] : starts[i] + response.num_own]
            if response.is_masked or not len(own_TRK):
                continue
            taken_RN = own_TRK.transpose(0, 1).flatten(1)
            self.loads_RX.scatter_add_(1, taken_RN, torch.ones_like(taken_RN))
            engine_TRK = self._of_engine(response)
            if len(engine_TRK) == response.length:
                engine_TRK = engine_TRK[response.num_prompt :]
            engine_TRK, own_TRK = engine_TRK.to(own_TRK.device), own_TRK[: len(engine_TRK)]
            is_other_TRK = (engine_TRK[..., None] != own_TRK[..., None, :]).all(-1)
            self.compared[0] += is_other_TRK.sum()
            self.compared[1] += is_other_TRK.numel()

    def _of_engine(self, response: Experience) -> Tensor:
        """[T, R, K]; no rows: none were recorded."""
        routes = bytearray(response.rollout.routes or b"")
        rows = torch.frombuffer(routes, dtype=torch.uint8) if routes else torch.empty(0, dtype=torch.uint8)
        return rows.view(-1, *self.shape).long()

    def metrics(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Fields of UpdateMetrics."""
        counts = torch.cat([self.compared, self.loads_RX.flatten()])
        if group is not None:
            dist.all_reduce(counts, group=group)
        compared, loads_RX = counts[:2].tolist(), counts[2:].view(self.loads_RX.shape).double().cpu()
        if not loads_RX.any():
            return {}
        shares_RX = loads_RX / loads_RX.sum(1, keepdim=True)
        entropy_R = -torch.xlogy(shares_RX, shares_RX).sum(1)
        num_experts = shares_RX.shape[1]
        return {
            "router_load_max": float((num_experts * shares_RX.max(1).values).mean()),
            "router_load_entropy": float(entropy_R.mean()) / math.log(num_experts),
            "router_gap": compared[0] / compared[1] if compared[1] else NAN,
        }

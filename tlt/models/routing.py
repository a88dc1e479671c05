"""Routes: each token's experts, recorded and replayed (R3, arXiv 2510.11370).

    layer(…, routing) ─▶ router ─▶ scores_NX ─ topk ─▶ its own choice ─▶ routing.found
                                                └─▶ routing.given, where there is one, taken in its place

Replayed experts are weighted by the router's scores, so gradients reach the router.

Axes: N tokens · R routers, one a layer with experts · K experts that a token takes · X experts of a layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MOST_EXPERTS = 256
"""Routes are kept as bytes, and travel beside features: bfloat16 has integers up to here."""


@dataclass(eq=False)
class Routing:
    """given_NRK: int64; -1: the router's own choice; None: everywhere."""

    given_NRK: Tensor | None = None
    found: dict[int, Tensor] = field(default_factory=dict)
    """By router, the router's own choices, [N, K]."""

    @property
    def found_NRK(self) -> Tensor:
        return torch.stack([self.found[router] for router in sorted(self.found)], dim=1)


def routers_of(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """transformers' modules say it by their names."""
    modules = (module for layer in layers for module in layer.modules())
    return [module for module in modules if type(module).__name__.endswith("outer")]


def watch_routers(layers: Sequence[nn.Module]) -> tuple[int, int]:
    """Lets each layer take `routing`, also when recomputed in the backward pass. Returns (R, K)."""
    found = [(layer, router) for layer in layers for router in routers_of([layer])]
    for number, (layer, router) in enumerate(found):
        _watch(layer, router, number)
    return len(found), max((_sizes(router)[0] for _, router in found), default=0)


def _sizes(router: nn.Module) -> tuple[int, int]:
    """Returns (experts that a token takes, experts)."""
    if hasattr(router, "top_k"):
        return int(router.top_k), int(router.num_experts)  # type: ignore[arg-type]
    config: Any = router.config
    return config.top_k_experts, config.num_experts


def _watch(layer: nn.Module, router: nn.Module, number: int) -> None:
    of_layer, of_router = layer.forward, router.forward
    current: list[Routing] = []

    def watched_layer(*args: Any, routing: Routing | None = None, **kwargs: Any) -> Any:
        if routing is None:
            return of_layer(*args, **kwargs)
        current.append(routing)
        try:
            return of_layer(*args, **kwargs)
        finally:
            current.pop()

    def watched_router(*args: Any, **kwargs: Any) -> Any:
        if not current:
            return of_router(*args, **kwargs)
        with _Choice(current[-1], number, router):
            return of_router(*args, **kwargs)

    layer.forward, router.forward = watched_layer, watched_router


class _Choice(TorchFunctionMode):
    """The router's call of topk over all experts; groups of experts are chosen by other calls."""

    def __init__(self, routing: Routing, number: int, router: nn.Module) -> None:
        super().__init__()
        self.routing, self.number, self.num_experts = routing, number, _sizes(router)[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape[1:] != (self.num_experts,):
            return found
        own_NK = found.indices
        self.routing.found[self.number] = own_NK
        if (given_NRK := self.routing.given_NRK) is None:
            return found
        given_NK = given_NRK[:, self.number]
        chosen_NK = torch.where(given_NK < 0, own_NK, given_NK)
        return torch.return_types.topk((args[0].gather(1, chosen_NK), chosen_NK))

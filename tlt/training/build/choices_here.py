"""What every "auto" of a configuration means on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tlt.base.config.schema import Config
from tlt.base.io.hub import resolve_description
from tlt.base.types import UserError
from tlt.drafter.formats.folder import load_shape
from tlt.drafter.vocabulary import DraftCosts, sizes_of
from tlt.engine.build.model import described_model
from tlt.engine.memory import automatic_bytes
from tlt.training.build.ranks import choose_ranks
from tlt.training.build.world import device_of, engine_dtype, layout_of


def resolve_here(config: Config) -> Iterator[tuple[str, str, bool]]:
    """Yields (key, value and reason, can be resolved). Instead of a value: the error, or an earlier key
    with the same error."""
    keys: dict[str, Callable[[Config], str]] = {
        "run.device": _device,
        "run.num_ranks": _ranks,
        "run.dtype": lambda config: str(engine_dtype(config)).removeprefix("torch."),
        "parallel.policy": _layout,
        "rollout.kv_gib": _caches,
        "drafter.vocabulary": _vocabulary,
    }
    told: dict[str, str] = {}
    for key, resolve in keys.items():
        try:
            yield key, resolve(config), True
        except UserError as error:
            first = told.setdefault(str(error), key)
            yield key, str(error) if first == key else f"as {first}", False


def _because(value: object, reason: str) -> str:
    return f"{value} ({reason})" if reason else str(value)


def _device(config: Config) -> str:
    choice = device_of(config)
    return _because(choice.name, choice.reason)


def _ranks(config: Config) -> str:
    choice = choose_ranks(config)
    return _because(choice.number, choice.reason)


def _layout(config: Config) -> str:
    layout = layout_of(config)
    return _because(layout.name, layout.reason)


def _caches(config: Config) -> str:
    if config.rollout.kv_gib is not None:
        return f"{config.rollout.kv_gib:g} GiB a rank"
    num_bytes = automatic_bytes(torch.device(device_of(config).name), choose_ranks(config).number)
    return f"{num_bytes / 2**30:.1f} GiB a rank"


def _vocabulary(config: Config) -> str:
    if config.drafter.path is None:
        return "no drafter"
    model = described_model(config)
    shape = load_shape(resolve_description(config.drafter.path), model)
    sizes = sizes_of(DraftCosts.of(model, shape), config.drafter.vocabulary)
    return f"{sizes[0]:,} to {sizes[-1]:,} tokens, by what is sampled" if sizes else "all tokens"

"""A run's configuration → device, dtype and layout of its ranks."""

from __future__ import annotations

import torch

from tlt.base.config.schema import Config
from tlt.base.types import UserError, resolve_dtype
from tlt.training.build.policy import master_dtype
from tlt.training.build.ranks import all_ranks, local_ranks, num_gpus
from tlt.training.launch.place import find_place
from tlt.training.ranks.sharding import LayoutChoice, choose_layout
from tlt.training.ranks.world import (
    DeviceChoice,
    Rendezvous,
    World,
    choose_device,
    init_process_group_from_env,
)


def device_of(config: Config) -> DeviceChoice:
    place, num_ranks = find_place(), local_ranks(config)
    has_own_gpu = place is not None and place.has_own_gpu and torch.cuda.is_available()
    return choose_device(config.run.device, num_ranks, num_ranks if has_own_gpu else num_gpus(config))


def engine_dtype(config: Config) -> torch.dtype:
    return resolve_dtype(config.run.dtype, device_of(config).name)


def layout_of(config: Config) -> LayoutChoice:
    """Raises UserError for keys that contradict the layout."""
    wanted = config.parallel.param_dtype
    layout = choose_layout(config.parallel.policy, all_ranks(config), device_of(config).name)
    if not layout.is_sharded and wanted is not None and resolve_dtype(wanted) != master_dtype(config):
        raise UserError(
            f"parallel.param_dtype: {wanted} is for a sharded policy, and this one is replicated "
            f"({layout.reason}); give --parallel.policy fsdp, or leave param_dtype out"
        )
    return layout


def join_ranks(config: Config, met: Rendezvous | None = None) -> World:
    torch.set_num_threads(config.run.threads_per_rank)
    is_sharded = layout_of(config).is_sharded
    device, timeout = device_of(config).name, config.run.timeout_seconds
    return init_process_group_from_env(device, timeout, met, group_of_one=is_sharded)

"""A run's configuration → the settings of each rank's engine."""

from __future__ import annotations

import torch

from tlt.base.config.schema import Config
from tlt.base.types import resolve_dtype
from tlt.engine.settings import EngineSettings
from tlt.training.build.ranks import local_ranks


def engine_settings(config: Config, device: torch.device | str) -> EngineSettings:
    rollout, dtype = config.rollout, resolve_dtype(config.run.dtype, torch.device(device).type)
    return EngineSettings(
        rollout.speculation,
        rollout.tuner,
        dtype,
        device,
        rollout.max_batch_size,
        config.drafter,
        kv_gib=rollout.kv_gib,
        num_ranks=local_ranks(config),
        engine=rollout.engine,
        vllm=config.vllm,
        equal_rows=config.run.equal_rows,
        routes="all" if rollout.router_replay else "first",
    )

"""A run's configuration → the number of its ranks."""

from __future__ import annotations

import torch

from tlt.config.schema import Config
from tlt.launch.place import find_place
from tlt.launch.ray_cluster import num_cluster_gpus

RANKS_ON_CPUS = 2
"""The default without GPUs: two ranks show all that TLT does, on two cores."""


def local_ranks(config: Config) -> int:
    """Returns the number of ranks on this machine: the launcher's, or all of them under `tlt train`."""
    place = find_place()
    return _ranks_to_start(config) if place is None else place.local_world_size


def all_ranks(config: Config) -> int:
    """Returns the number of ranks on all machines together."""
    place = find_place()
    return _ranks_to_start(config) if place is None else place.world_size


def _ranks_to_start(config: Config) -> int:
    """Returns run.num_ranks; by default one rank for each GPU."""
    return config.run.num_ranks or (0 if config.run.device == "cpu" else num_gpus(config)) or RANKS_ON_CPUS


def num_gpus(config: Config) -> int:
    """Returns the number of GPUs of this machine, or of the Ray cluster if Ray starts the ranks."""
    starts_on_ray = find_place() is None and config.run.launcher == "ray"
    return num_cluster_gpus() if starts_on_ray else torch.cuda.device_count()

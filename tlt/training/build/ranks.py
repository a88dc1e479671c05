"""A run's configuration → the number of its ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tlt.base.config.schema import Config
from tlt.base.types import resolve_dtype
from tlt.engine.build.model import described_model
from tlt.engine.memory import CPU_SHARE, machine_bytes
from tlt.models.decoder import ModelConfig
from tlt.models.hf.weights import count_parameters
from tlt.models.lora import count_adapters
from tlt.training.build.policy import base_dtype, master_dtype
from tlt.training.launch.place import find_place
from tlt.training.launch.ray_cluster import num_cluster_gpus

CPU_PROCESS_BYTES = 520 * 2**20
"""PyTorch, transformers and compiled loops on CPUs: a run of a tiny model took 508 to 533 MiB."""
_TRAINED_COPIES = 7
"""Weights, gradients, two moments, and three copies in a checkpoint."""
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class RankChoice:
    """reason: for the user; empty where the user or the GPUs decide."""

    number: int
    reason: str = ""


def local_ranks(config: Config) -> int:
    place = find_place()
    return choose_ranks(config).number if place is None else place.local_world_size


def all_ranks(config: Config) -> int:
    return choose_ranks(config).number


def choose_ranks(config: Config) -> RankChoice:
    if (place := find_place()) is not None:
        return RankChoice(place.world_size)
    if config.run.num_ranks != "auto":
        return RankChoice(config.run.num_ranks)
    if config.run.device != "cpu" and (num := num_gpus(config)):
        return RankChoice(num)
    shape = described_model(config)
    each, by_cores = standing_bytes(config, shape), num_cores() // config.run.threads_per_rank
    return ranks_on_cpus(by_cores, machine_bytes(), each, config.rollout.problems_per_step)


def ranks_on_cpus(by_cores: int, machine: int, each: int, num_problems: int) -> RankChoice:
    """As many ranks as cores, memory and problems carry, at least one.

    machine: bytes of memory.
    each: bytes that a rank always holds.
    num_problems: of a step.
    """
    by_memory = int((1 - CPU_SHARE) * machine) // each
    limits = {"the cores": by_cores, "the memory": by_memory, "problems_per_step": num_problems}
    limit, number = min(limits.items(), key=lambda item: item[1])
    return RankChoice(max(number, 1), f"as many as {limit} allow{'s' * (limit != 'the cores')}")


def num_cores() -> int:
    cores = len(os.sched_getaffinity(0))
    if _CPU_QUOTA.is_file():
        quota, period = _CPU_QUOTA.read_text().split()
        cores = cores if quota == "max" else min(cores, max(int(quota) // int(period), 1))
    return cores


def standing_bytes(config: Config, shape: ModelConfig) -> int:
    """Of a rank on CPUs, without caches and activations: known before a prompt is read."""
    num, has_lora = count_parameters(shape), config.lora.is_used
    trained = (count_adapters(shape, config.lora) if has_lora else num) * master_dtype(config).itemsize
    frozen = num * base_dtype(config).itemsize if has_lora else 0
    engine = num * resolve_dtype(config.run.dtype).itemsize
    return CPU_PROCESS_BYTES + _TRAINED_COPIES * trained + frozen + engine


def num_gpus(config: Config) -> int:
    starts_on_ray = find_place() is None and config.run.launcher == "ray"
    return num_cluster_gpus() if starts_on_ray else torch.cuda.device_count()

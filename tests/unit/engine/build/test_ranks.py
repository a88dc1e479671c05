"""The number of ranks and the number type that "auto" stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.refused import refused
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.types import resolve_dtype
from tlt.engine.memory import machine_bytes
from tlt.models.hf.families import load_model_config
from tlt.training.build import ranks
from tlt.training.build.layout import engine_dtype
from tlt.training.build.ranks import (
    CPU_PROCESS_BYTES,
    RankChoice,
    choose_ranks,
    num_cores,
    ranks_on_cpus,
    standing_bytes,
)

GIB = 2**30
RECIPES = Path(__file__).parents[4] / "recipes"


def config_of(**keys: object) -> Config:
    sections = {"model": {"path": RECIPES / "countdown/base"}, "task": {"name": "countdown"}}
    return load_config(sections, {name.replace("__", "."): value for name, value in keys.items()})


@pytest.mark.parametrize(
    ("cores", "gib", "problems", "number", "bound"),
    [
        (2, 64, 8, 2, "the cores"),
        (64, 8, 8, 4, "the memory"),
        (64, 64, 8, 8, "problems_per_step"),
        (1, 0.5, 8, 1, "the memory"),
        (0, 64, 8, 1, "the cores"),
    ],
)
def test_cores_memory_and_problems_bound_the_ranks_on_cpus_and_one_always_runs(
    cores: int, gib: float, problems: int, number: int, bound: str
) -> None:
    choice = ranks_on_cpus(cores, int(gib * GIB), GIB, problems)
    assert choice.number == number
    assert bound in choice.reason


def test_auto_is_a_rank_for_each_gpu_and_a_given_number_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert choose_ranks(config_of()) == RankChoice(3)
    assert choose_ranks(config_of(run__num_ranks=5)) == RankChoice(5)
    monkeypatch.setattr(ranks, "num_cores", lambda: 6)
    monkeypatch.setattr(ranks, "machine_bytes", lambda: 64 * GIB)
    on_cpus = config_of(run__device="cpu", run__threads_per_rank=2)
    assert choose_ranks(on_cpus) == RankChoice(3, "as many as the cores allow")


def test_a_container_quota_bounds_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(ranks, "_CPU_QUOTA", quota)
    assert num_cores() == 8, "no quota is written"
    for written, cores in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)):
        quota.write_text(f"{written}\n")
        assert num_cores() == cores


def test_a_rank_that_trains_adapters_holds_less() -> None:
    shape = load_model_config(RECIPES / "countdown/base")
    full, adapters = (standing_bytes(config_of(lora__rank=rank), shape) for rank in (0, 1))
    assert CPU_PROCESS_BYTES < adapters < full < machine_bytes()


def test_the_dtype_auto_is_bfloat16_on_a_gpu_and_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", "cuda") == torch.bfloat16
    assert resolve_dtype("auto") == torch.float32
    assert resolve_dtype("float64", "cuda") == torch.float64
    assert engine_dtype(config_of(run__device="cpu")) == torch.float32
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert engine_dtype(config_of()) == torch.bfloat16
    assert engine_dtype(config_of(run__dtype="float32")) == torch.float32


def test_a_number_of_ranks_is_auto_or_a_number() -> None:
    for wrong in ("two", 0, None, 2.0):
        with refused(r"run\.num_ranks is .*(auto, or a number|greater than or equal)"):
            config_of(run__num_ranks=wrong)

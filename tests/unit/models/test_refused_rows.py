"""What has no equal rows is refused. test_equal_rows.py has what is computed on a CPU, tests/vllm/test_equal_rows.py
on a GPU."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.lossless.helpers import CONFIG
from tests.refused import refused
from tlt.apps.run import start
from tlt.base.config.load import load_config
from tlt.models.any_config import AnyConfig
from tlt.models.equal_rows import check_equal_rows
from tlt.models.loops import blocks
from tlt.training.build import models
from tlt.training.ranks.world import World


@pytest.mark.parametrize(
    ("device", "config", "dtype", "said"),
    [
        ("cpu", CONFIG, torch.float64, "dtype is float64, .*; set float32 or bfloat16$"),
        (
            "cpu",
            replace(CONFIG, intermediate_size=50),
            torch.float32,
            "sizes that are no multiples of 16 are computed one operation at a time; leave it out$",
        ),
        (
            "cuda",
            CONFIG,
            torch.float64,
            "not in float64 on a GPU; give dtype bfloat16 or float32, or false$",
        ),
        (
            "cuda",
            AnyConfig(**asdict(CONFIG)),
            torch.bfloat16,
            "transformers' modules have no equal rows; give false, or a",
        ),
        (
            "cuda",
            replace(CONFIG, num_heads=64, num_kv_heads=1),
            torch.bfloat16,
            "64 query heads share a key head, .* 32 may;",
        ),
    ],
)
def test_what_has_no_equal_rows_is_refused_in_one_line(
    device: str, config: Any, dtype: torch.dtype, said: str
) -> None:
    if device == "cpu":
        pytest.importorskip("numba", reason="Numba is not installed: nothing has equal rows on a CPU")
    check_equal_rows(CONFIG, torch.bfloat16, device)
    with refused(f"^run.equal_rows: .*{said}"):
        check_equal_rows(config, dtype, device)


def test_a_run_is_refused_before_its_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        "recipes/countdown/quickstart.toml", {"run.equal_rows": True, "run.dtype": "float64"}
    )
    with refused("^run.equal_rows: dtype is float64, .*; set float32 or bfloat16$"):
        start.preflight(config)
    monkeypatch.setattr(start, "device_of", lambda _: SimpleNamespace(name="cuda"))
    with refused("^run.equal_rows: not in float64 on a GPU"):
        start.preflight(config)


def test_ranks_that_multiply_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = World(0, 1, 0, torch.device("cpu"), HashStore(), None)
    monkeypatch.setattr(blocks, "bfloat16_by", lambda: "AVX512_BF16")
    models.check_same_products(alone, torch.bfloat16)
    monkeypatch.setattr(models, "broadcast_json", lambda world, here: here.replace("AVX512_BF16", "AMX"))
    models.check_same_products(alone, torch.float32)
    with refused("^run.equal_rows: bfloat16 by AVX512_BF16, but bfloat16 by AMX on rank 0; give processors"):
        models.check_same_products(alone, torch.bfloat16)

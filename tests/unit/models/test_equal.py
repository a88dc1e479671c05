"""Equal rows on a GPU: what is refused. What the kernels compute is in tests/vllm/test_equal_rows.py."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lossless.helpers import CONFIG
from tests.refused import refused
from tlt.apps.run import start
from tlt.base.config.load import load_config
from tlt.models.any_config import AnyConfig
from tlt.models.equal import check_equal_rows


@pytest.mark.parametrize(
    ("config", "dtype", "said"),
    [
        (CONFIG, torch.float64, "not in float64 on a GPU; give run.dtype bfloat16 or float32, or false$"),
        (
            AnyConfig(**asdict(CONFIG)),
            torch.bfloat16,
            "transformers' modules have no equal rows; give false, or a",
        ),
        (
            replace(CONFIG, num_heads=64, num_kv_heads=1),
            torch.bfloat16,
            "64 query heads share a key head, .* 32 may;",
        ),
    ],
)
def test_what_has_no_equal_rows_on_a_gpu_is_refused_in_one_line(
    config: Any, dtype: torch.dtype, said: str
) -> None:
    check_equal_rows(CONFIG, torch.bfloat16)
    with refused(f"^run.equal_rows: .*{said}"):
        check_equal_rows(config, dtype)


def test_a_run_is_refused_before_its_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        "recipes/countdown/quickstart.toml", {"run.equal_rows": True, "run.dtype": "float64"}
    )
    with refused("^run.equal_rows: run.dtype is float64, .*; set float32 or bfloat16$"):
        start.preflight(config)
    monkeypatch.setattr(start, "device_of", lambda _: SimpleNamespace(name="cuda"))
    with refused("^run.equal_rows: not in float64 on a GPU"):
        start.preflight(config)

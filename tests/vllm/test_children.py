"""What needs a vLLM of its own: the model runner of GPUs, by Triton's interpreter, and a cache that is too
small. The children are those of the table (benchmarks/vllm_table.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.side_by_side import answers
from benchmarks.vllm_table import Size, Start, judge, random_drafter, requests_of, run_child
from tests.vllm.parts import BASE, DRAFTER, in_vllm
from tlt.assembly.model import load_model

pytestmark = in_vllm


def cells_of(start: Start, drafter: Path, own: Any, folder: Path) -> list[dict[str, Any]]:
    requests = requests_of(load_model(BASE, torch.float32), start, own)
    ours = {law: answers(own, wanted) for law, wanted in requests.items()}
    found = run_child(start, requests, drafter, folder)
    assert "refused" not in found, found
    return judge(start, requests, ours, found)


@pytest.mark.parametrize(("drafter", "accepts"), [("EAGLE", True), ("random", False)])
def test_the_model_runner_of_gpus_gives_our_tokens(
    own: Any, drafter: str, accepts: bool, tmp_path: Path
) -> None:
    folder = DRAFTER if drafter == "EAGLE" else random_drafter(tmp_path / "random")
    cells = cells_of(Start("V2", drafter, 1, Size(1, 2, 14, 2)), folder, own, tmp_path)
    assert len(cells) == 6
    for cell in cells:
        assert (cell["differences"], cell["num_equal"]) == ((), cell["num_responses"])
        assert cell["logprob_gap"] < 2e-4
        assert cell["lengths"] == "changing" or (cell["accept_length"] > 3) == accepts


def test_a_cache_that_is_too_small_puts_sequences_back_and_changes_no_token(own: Any, tmp_path: Path) -> None:
    cells = cells_of(Start("V1", "EAGLE", 1, Size(8, 2, 140, 12), kv_gib=0.014), DRAFTER, own, tmp_path)
    assert all(cell["differences"] == () for cell in cells)
    assert sum(cell["num_preemptions"] for cell in cells) > 3

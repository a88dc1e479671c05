"""What needs a vLLM of its own: the model runner of GPUs, by Triton's interpreter, a cache that is too
small, and prompts that share blocks of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.side_by_side import Comparison, answers, compare
from tests.vllm.children import Cell, Start, child, in_child, requests_of
from tests.vllm.parts import BASE, DRAFTER, in_vllm, make_drafter

pytestmark = in_vllm


def beside(start: Start, drafter: Path, own: Any, folder: Path) -> list[tuple[Cell, Comparison]]:
    requests = requests_of(start, own)
    ours = {law: answers(own, wanted) for law, wanted in requests.items()}
    cells = in_child(folder, child, start, requests, drafter)
    assert len(cells) == 6
    return [(cell, compare(requests[cell.law], ours[cell.law], cell.responses, BASE)) for cell in cells]


@pytest.mark.parametrize(("drafter", "accepts"), [("EAGLE", True), ("random", False)])
def test_the_model_runner_of_gpus_gives_our_tokens(
    own: Any, drafter: str, accepts: bool, tmp_path: Path
) -> None:
    folder = DRAFTER if drafter == "EAGLE" else make_drafter(BASE, tmp_path / "random")
    for cell, compared in beside(Start("V2", 1, 2, tokens=14, batch=2), folder, own, tmp_path):
        assert (compared.differences, compared.num_equal) == ((), compared.num_responses)
        assert compared.logprob_gap < 2e-4
        assert cell.lengths == "changing" or (cell.accept_length > 3) == accepts


def test_a_cache_that_is_too_small_puts_sequences_back_and_changes_no_token(own: Any, tmp_path: Path) -> None:
    start = Start("V1", 8, 2, tokens=140, batch=12, kv_gib=0.014)
    found = beside(start, DRAFTER, own, tmp_path)
    assert all(compared.differences == () for _, compared in found)
    assert sum(cell.num_preemptions for cell, _ in found) > 3


def test_blocks_that_prompts_share_are_read_once_and_change_no_token(own: Any, tmp_path: Path) -> None:
    start = Start("V1", 2, 4, tokens=30, batch=2, num_given=290)
    prompt = 290  # and more
    for cell, compared in beside(start, DRAFTER, own, tmp_path):
        assert compared.differences == ()
        if cell.law == "1" and cell.lengths == "changing":
            assert cell.num_read < 8 * prompt

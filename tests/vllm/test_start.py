"""What vLLM is started with."""

from __future__ import annotations

import os

import pytest

from tests.vllm.parts import BASE, in_vllm
from tlt.engine.settings import EngineSettings
from tlt.engine.vllm.settings import VllmSettings

pytestmark = in_vllm


def test_vllm_captures_graphs_for_every_draft_length_also_where_one_sequence_runs_at_a_time() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    from tlt.engine.vllm.start import arguments

    drafter = {"method": "eagle", "model": "drafter"}
    for depths in ((0, 6), (0, 1, 2, 3, 4, 6, 8)):
        settings = VllmSettings(BASE, EngineSettings(max_batch_size=1), 64, drafter, depths)
        made = arguments(settings)
        asked = made["speculative_config"]
        lengths = build_dynamic_sd_schedule_lookup(
            asked["num_speculative_tokens_per_batch_size"],
            made["max_num_seqs"],
            asked["num_speculative_tokens"],
        )
        assert set(lengths[1:]) == set(depths)  # as vLLM's graphs do; entry 0 is no batch size


@pytest.mark.parametrize("launched", [None, "2"])
def test_the_launchers_count_of_ranks_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, launched: str | None
) -> None:
    from tlt.engine.vllm.start import _as_launched

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if launched is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", launched)
    with _as_launched():
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # as vLLM's CPU platform does
    assert os.environ.get("LOCAL_WORLD_SIZE") == launched

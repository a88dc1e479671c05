"""The comparison of vLLM's own tests with and without the plug-in, and the hub they see, need no vLLM here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from benchmarks.vllm_own_tests import differences
from benchmarks.vllm_own_tests.hub import NUM_LAYERS, STAND_INS, make_hub
from benchmarks.vllm_own_tests.report import is_explained, summarize, to_markdown

RECIPE = Path("recipes/countdown")


def lines(**outcomes: str) -> list[dict[str, Any]]:
    """Returns what a way's run of one file writes. outcomes: by test."""
    said = [{"file": "a.py", "test": test, "outcome": how, "why": "no"} for test, how in outcomes.items()]
    return [*said, {"file": "a.py", "exit": 0, "seconds": 1.0}]


def test_a_test_that_passes_only_without_the_plug_in_is_named_unless_its_reason_is_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(differences, "BY_DESIGN", {"a.py::refused": "the law refuses it"})
    found = {
        "without": lines(kept="passed", refused="passed", broken="failed", skipped="skipped"),
        "asleep": lines(kept="passed", refused="passed", broken="failed", skipped="skipped"),
        "awake": lines(kept="passed", refused="failed", broken="passed", skipped="skipped"),
    }
    report = summarize(found)
    assert is_explained(report)
    assert [(one["test"], one["num"], one["awake"]) for one in report["failed"]] == [("broken", 1, 1)]
    assert [one["reason"] for one in report["lost"]] == ["the law refuses it"]
    text = to_markdown({"command": "c", "environment": {}, "sources": "vllm", **report})
    assert "| a.py | 2 | 1 | 1 | 2 | 1 | 1 |" in text

    found["asleep"] = lines(kept="passed")  # its process ended before the other test
    report = summarize(found)
    assert not is_explained(report)
    assert [one["said"] for one in report["lost"] if one["way"] == "asleep"] == ["its process ended before"]


def test_the_names_that_vllms_tests_ask_the_hub_for_are_local_models(tmp_path: Path) -> None:
    make_hub(RECIPE / "base", RECIPE / "drafter", tmp_path)
    for names in STAND_INS.values():
        for name in names:
            found = Path(snapshot_download(name, cache_dir=tmp_path / "hub", local_files_only=True))
            assert (found / "model.safetensors").is_file()
    small = snapshot_download("facebook/opt-125m", cache_dir=tmp_path / "hub", local_files_only=True)
    assert json.loads((Path(small) / "config.json").read_text())["num_hidden_layers"] == NUM_LAYERS

"""tlt drafter train: on which responses, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.apps.cli.parts import WINDOW, fail, generate, read_lines, succeed, write_lines
from tests.unit.engine.own.pretend_device import pretended


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "part"),
    [
        (
            {"prompt_ids": [3], "token_ids": "x"},
            "responses.jsonl:1: token_ids must be a list of whole numbers",
        ),
        ({"token_ids": [3]}, "responses.jsonl:1: prompt_ids must be a list of whole numbers"),
        ({"prompt_ids": [3], "token_ids": [61]}, "jsonl:1: token id 61 is outside the vocabulary of 61"),
        ({"prompt_ids": [3], "token_ids": [4] * WINDOW}, "has 65 tokens but the model's window is 64"),
        ({"prompt_ids": [3], "token_ids": [4]}, "has no response of three tokens or more"),
    ],
)
def test_drafter_train_refuses_bad_responses(
    line: Any, part: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("responses.jsonl", line)
    words = ("--responses", "responses.jsonl", "--out", "drafter")
    assert part in fail(capsys, "drafter", "train", str(model), *words)


@pytest.mark.usefixtures("here")
def test_a_trained_drafter_drafts_and_changes_no_token(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"}, {"prompt": "[1:1]"})
    generate(capsys, model, "--samples", "4", "--dtype", "float64")
    plain = read_lines("out.jsonl")
    arguments = ("--responses", "out.jsonl", "--out", "drafter", "--tokens-per-micro-step", "32")
    summary = succeed(capsys, "drafter", "train", str(model), *arguments)
    assert summary["steps"] >= 1
    about = json.loads(Path("drafter/config.json").read_text())["tlt"]
    assert (about["preset"], about["num_tokens"]) == ("hass", summary["tokens"])
    assert len(about["policy_hash"]) == 64, "of the model it was trained for, as tlt drafter export reads it"
    assert 0 < about["cpu_seconds"] == summary["cpu_seconds"]
    for speculation in ("2x1x2", "3x2x5", "adaptive"):
        options = f"--speculation {speculation} --drafter drafter --samples 4 --dtype float64"
        summary = generate(capsys, model, *options.split())
        if speculation != "adaptive":  # whether that one ever speculates is decided by the clock
            assert summary["accept_length"] >= 1
        assert [r["token_ids"] for r in read_lines("out.jsonl")] == [r["token_ids"] for r in plain]


@pytest.mark.usefixtures("here")
def test_a_drafter_trained_from_prompts_is_the_one_trained_from_their_responses(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"}, {"prompt": "[1:1]"})
    generate(capsys, model, "--samples", "4", "--max-tokens", "20")
    common = ("--tokens-per-micro-step", "32")
    succeed(capsys, "drafter", "train", str(model), "--responses", "out.jsonl", "--out", "a", *common)
    answering = ("--prompts", "prompts.jsonl", "--samples", "4", "--max-tokens", "20")
    summary = succeed(capsys, "drafter", "train", str(model), *answering, "--out", "b", *common)
    assert summary["responses"] == 8
    one, other = (load_file(Path(name) / "model.safetensors") for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("preset", ["dflash", "dspark"])
def test_a_trained_block_drafter_drafts_is_measured_and_changes_no_token(
    preset: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"}, {"prompt": "[1:1]"})
    generate(capsys, model, "--samples", "4", "--dtype", "float64")
    plain = read_lines("out.jsonl")
    words = f"--responses out.jsonl --out drafter --tokens-per-micro-step 32 --preset {preset} --layers 1 --block 3"
    succeed(capsys, "drafter", "train", str(model), *words.split())
    config = json.loads(Path("drafter/config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert config["block_size"] == (4 if preset == "dflash" else 3)
    said = {token for line in plain for token in (*line["prompt_ids"], *line["token_ids"])}
    ids = {**config, **config.get("dflash_config", {})}
    assert ids["mask_token_id"] not in said
    for speculation in ("3x1x3", "3x2x5", "adaptive"):
        options = f"--speculation {speculation} --drafter drafter --samples 4 --dtype float64"
        generate(capsys, model, *options.split())
        assert [r["token_ids"] for r in read_lines("out.jsonl")] == [r["token_ids"] for r in plain]
    words = "--prompts prompts.jsonl --depth 3 --max-tokens 20"
    measured = succeed(capsys, "drafter", "eval", "drafter", "--model", str(model), *words.split())
    assert measured["form"] == preset
    assert len(measured["by_position"]) == 3
    words = "--responses out.jsonl --out again --init drafter --tokens-per-micro-step 32"
    succeed(capsys, "drafter", "train", str(model), *words.split())
    again = json.loads(Path("again/config.json").read_text())
    again |= again.get("dflash_config", {})
    assert [again[name] for name in ("mask_token_id", "target_layer_ids")] == [
        ids[name] for name in ("mask_token_id", "target_layer_ids")
    ]
    options = "--prompts prompts.jsonl --out x.jsonl --speculation 4x1x4 --drafter drafter"
    assert fail(capsys, "generate", str(model), *options.split()) == (
        "speculation: learned:4x1x4 drafts 4 tokens, and the drafter's block has 3; give at most that many"
    )


@pytest.mark.usefixtures("here")
def test_what_only_a_new_block_drafter_has_is_refused_for_others(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("drafter", "train", str(model), "--responses", "r.jsonl", "--out", "d")
    assert fail(capsys, *words, "--layers", "2").startswith("--layers: it is for block drafters alone")
    kept = fail(capsys, *words, "--preset", "dflash", "--init", "drafter", "--block", "3")
    assert kept == "--block: that of --init is kept; leave it out"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("preset", ["hass", "dspark"])
def test_a_drafter_is_trained_and_measured_on_the_gpu_where_there_is_one_as_on_a_cpu(
    preset: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pretended GPU refuses to compute with tensors of both devices."""
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"}, {"prompt": "[1:1]"})
    common = ("--prompts", "prompts.jsonl", "--max-tokens", "20", "--temperature", "1", "--dtype", "float32")
    shape = ("--preset", preset, "--samples", "4", "--tokens-per-micro-step", "32")

    def train_and_measure(out: str) -> tuple[dict[str, Any], dict[str, Any]]:
        trained = succeed(capsys, "drafter", "train", str(model), "--out", out, *common, *shape)
        return trained, succeed(capsys, "drafter", "eval", out, "--model", str(model), *common)

    on_cpu = train_and_measure("cpu")
    with pretended(monkeypatch):
        on_gpu = train_and_measure("gpu")
    assert [record["device"] for record in (*on_cpu, *on_gpu)] == ["cpu", "cpu", "cuda", "cuda"]
    for name in ("loss", "acceptance"):
        assert on_gpu[0][name] == pytest.approx(on_cpu[0][name], rel=1e-5)
    assert on_gpu[1]["by_position"] == on_cpu[1]["by_position"]
    one, other = (load_file(Path(name) / "model.safetensors") for name in ("cpu", "gpu"))
    assert all(torch.allclose(one[name], other[name], atol=1e-3) for name in one)

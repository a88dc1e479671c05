"""`tlt drafter eval` and `tlt drafter export`: what they count, refuse and write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.helpers import CONFIG, VOCAB, make_policy
from tlt.apps.cli import main as cli
from tlt.apps.cli.drafter_eval import measure_chains, summarize
from tlt.base.types import Request, SamplingParams
from tlt.drafter.formats.folder import StoredDrafter, save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.model import DraftModel
from tlt.drafter.shape import Method, drafter_shape
from tlt.engine.build.model import Model
from tlt.engine.settings import EngineSettings
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.weights import content_hash, save_model

DEEP = replace(CONFIG, num_layers=4)


def make_drafter(config: ModelConfig, method: Method = "eagle", vocab: int | None = None) -> StoredDrafter:
    model = new_model(drafter_shape(config, method, vocab)).initialize(2)
    return StoredDrafter(model.config, {name: t.detach() for name, t in model.state_dict().items()}, {})


def requests(temperature: float = 0.0, num: int = 6, max_tokens: int = 24) -> list[Request]:
    params = SamplingParams(temperature, max_tokens=max_tokens, seed=3)
    return [Request(f"p{i}", 0, tuple(range(1 + i, 6 + i)), params) for i in range(num)]


def tensors(policy: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


def model_of(policy: Transformer) -> Model:
    return Model(Path(), policy.config, None, (), tensors(policy))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("method", "vocab"), [("eagle", None), ("eagle3", None), ("eagle3", 20)])
def test_each_position_is_accepted_at_most_as_often_as_the_one_before(
    method: Method, vocab: int | None, temperature: float
) -> None:
    policy, drafter = Transformer(DEEP).initialize(1, 0.3), make_drafter(DEEP, method, vocab)
    settings = EngineSettings(max_batch_size=4)
    found = measure_chains(model_of(policy), drafter, 3, settings, requests(temperature))
    assert (
        1 < found["accept_length"] < 1 + sum(found["by_position"]) + 1e-9
    )  # a response may end within a chain
    assert list(found["by_position"]) == sorted(found["by_position"], reverse=True)
    assert found["num_verifications"] > 6
    assert found["draft_vocab"] == (vocab or VOCAB)


def read_strictly(text: str) -> Any:
    """The value of a JSON text; NaN and Infinity, which JSON does not have, are refused."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_prompts_of_one_token_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A drafter's first guess needs the target's features of two tokens."""
    model, drafter, prompts = tmp_path / "model", tmp_path / "drafter", tmp_path / "prompts.jsonl"
    save_model(model, CONFIG, tensors(make_policy().float()), dtype=torch.float32, source=None)
    save_drafter(drafter, new_model(drafter_shape(CONFIG)).initialize(2), torch.float32)
    prompts.write_text('{"prompt_ids": [1]}\n')
    arguments = ["--model", str(model), "--prompts", str(prompts), "--max-tokens", "1"]
    assert cli.main(["drafter", "eval", str(drafter), *arguments]) == 2
    told, error = capsys.readouterr().err.splitlines()
    assert told == "tlt: 1 responses on cpu"
    assert "not one guess was verified; give prompts of two tokens or more" in error


def _export_says_whose_drafter_it_is(
    folder: Path, model: Path, draft_model: DraftModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hash of what a run or tlt drafter train had in memory is that of the checkpoint it saved."""
    own = content_hash(Transformer(DEEP).initialize(1, 0.3).state_dict())
    cases = [
        ({"policy_hash": own}, 0),
        ({}, 0),
        ({"policy_hash": "e" * 64}, 1),
    ]
    for index, (about, num_lines) in enumerate(cases):
        drafter, out = folder / f"of{index}", folder / f"out{index}"
        save_drafter(drafter, draft_model, torch.float32, about)
        arguments = [
            "drafter",
            "export",
            str(drafter),
            "--target",
            str(model),
            "--to",
            str(out),
            "--format",
            "vllm-eagle3",
        ]
        assert cli.main(arguments) == 0
        error = capsys.readouterr().err
        assert error.count("\n") == num_lines
        assert ("trained for policy eeeeeeeeeeee, this target is " + own[:12] in error) == bool(num_lines)
        readme = (out / "README.md").read_text()
        assert own in readme
        assert all(recorded in readme for recorded in about.values())


def test_the_commands_export_and_evaluate_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, drafter, out = tmp_path / "model", tmp_path / "drafter", tmp_path / "out.json"
    save_model(model, DEEP, tensors(Transformer(DEEP).initialize(1, 0.3)), dtype=torch.float32, source=None)
    draft_model = new_model(drafter_shape(DEEP, "eagle3")).initialize(2)
    save_drafter(drafter, draft_model, torch.float32)
    _export_says_whose_drafter_it_is(tmp_path, model, draft_model, capsys)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt_ids": [1, 2, 3]}) + "\n")
    exported = ["--target", str(model), "--to", str(tmp_path / "served"), "--format", "vllm-eagle3"]
    assert cli.main(["drafter", "export", str(drafter), *exported]) == 0
    assert cli.main(["drafter", "export", str(drafter), *exported]) == 2
    assert "exists; give the name of a new folder" in capsys.readouterr().err
    asked = ["--model", str(model), "--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "8"]
    found = []
    for folder in (drafter, tmp_path / "served"):
        assert cli.main(["drafter", "eval", str(folder), *asked, "--out", str(out)]) == 0
        printed = capsys.readouterr().out
        assert summarize(read_strictly(printed)).headline.startswith("accept length ")
        summary = read_strictly(out.read_text())
        assert read_strictly(printed.splitlines()[-1]) == summary
        found.append(summary["by_position"])
    assert found[0] == found[1]

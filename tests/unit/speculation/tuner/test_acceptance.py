"""What `tlt drafter eval` counts: held against the engine's own counts, a target of known entropy and
uncached drafters."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.helpers import CONFIG, VOCAB, make_policy
from tlt.apps.bench.acceptance import ChainAcceptance, Chains, observe, speedup
from tlt.apps.cli import main as cli
from tlt.apps.cli.drafter_eval import summarize
from tlt.base.types import Request, SamplingParams
from tlt.drafter.formats.folder import StoredDrafter, save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.model import DraftModel
from tlt.drafter.pairs import align
from tlt.drafter.shape import Method, drafter_shape
from tlt.engine.build.model import Model
from tlt.engine.settings import EngineSettings
from tlt.models.attention import PackedCausal
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


def chains(model: Model, drafter: StoredDrafter, depth: int, batch_size: int) -> Chains:
    return Chains(model, drafter, depth, EngineSettings(max_batch_size=batch_size))


def count(acceptance: ChainAcceptance) -> tuple[float, float]:
    """(guesses, accepted ones) in the buckets by entropy."""
    buckets = acceptance.by_entropy
    return sum(b.num_guesses for b in buckets), sum(b.num_guesses * b.accepted for b in buckets)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("method", "vocab"), [("eagle", None), ("eagle3", None), ("eagle3", 20)])
def test_what_is_counted_by_entropy_and_confidence_is_what_the_engine_counted(
    method: Method, vocab: int | None, temperature: float
) -> None:
    policy = Transformer(DEEP).initialize(1, 0.3)
    found = observe(chains(model_of(policy), make_drafter(DEEP, method, vocab), 3, 4), requests(temperature))
    num_guesses, num_accepted = count(found)
    survivors = [share * found.num_verifications for share in found.by_position]
    assert num_accepted == pytest.approx(sum(survivors))
    assert num_guesses == pytest.approx(found.num_verifications + survivors[0] + survivors[1])
    assert sum(b.num_guesses for b in found.by_confidence) == num_guesses
    assert sum(b.num_guesses * b.accepted for b in found.by_confidence) == pytest.approx(num_accepted)


def test_a_target_that_knows_nothing_has_the_entropy_of_its_vocabulary() -> None:
    policy = Transformer(CONFIG).initialize(1, 0.0)
    (bucket,) = observe(chains(model_of(policy), make_drafter(CONFIG), 2, 4), requests(1.0)).by_entropy
    assert bucket.mean == pytest.approx(math.log(VOCAB), rel=1e-5)


def test_the_confidence_is_the_draft_distributions_own() -> None:
    """One guess after a prompt, against an uncached forward of the trainable drafter on the features of a
    plain one."""
    policy = make_policy().float()
    drafter = make_drafter(CONFIG)
    (request,) = requests(num=1, max_tokens=1)
    (bucket,) = observe(chains(model_of(policy), drafter, 1, 1), [request]).by_confidence
    model = new_model(drafter.config)
    model.load_state_dict(drafter.tensors)
    tokens_T = torch.tensor(request.prompt_ids)
    pairs = align([len(tokens_T)])
    with torch.no_grad():
        attend = PackedCausal(CONFIG, [len(tokens_T)])
        features_TE = policy(tokens_T, attend.positions(), attend)
        embeddings_ME = policy.model.embed_tokens(tokens_T[pairs.token_index_M])
        hidden_ME = model(
            embeddings_ME,
            features_TE[pairs.feature_index_M],
            pairs.positions_M,
            PackedCausal(CONFIG, pairs.lengths),
        )
        expected = model.logits(hidden_ME, policy.head_weight)[-1].softmax(-1).max().item()
    assert bucket.num_guesses == 1
    assert bucket.mean == pytest.approx(expected, rel=1e-4)


def test_the_timing_gives_a_ratio_per_round_and_equal_responses() -> None:
    policy = make_policy().float()
    ratio, num_different = speedup(
        chains(model_of(policy), make_drafter(CONFIG), 2, 2), requests(num=2, max_tokens=4), 2
    )
    assert len(ratio.values) == 2
    assert num_different == 0


def read_strictly(text: str) -> Any:
    """The value of a JSON text; NaN and Infinity, which JSON does not have, are refused."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_an_evaluation_without_an_upper_end_is_strict_json() -> None:
    """The last bucket by entropy is open, and one round tells no interval."""
    model = model_of(Transformer(CONFIG).initialize(1, 0.0))
    found = observe(chains(model, make_drafter(CONFIG), 2, 4), requests(1.0))
    ratio, _ = speedup(chains(model, make_drafter(CONFIG), 2, 2), requests(num=2, max_tokens=4), 1)
    for value in (found, ratio):
        json.dumps(asdict(value), allow_nan=False)
    assert found.by_entropy[-1].high is None


def test_prompts_of_one_token_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A drafter's first guess needs the target's features of two tokens."""
    model, drafter, prompts = tmp_path / "model", tmp_path / "drafter", tmp_path / "prompts.jsonl"
    save_model(model, CONFIG, tensors(make_policy().float()), dtype=torch.float32, source=None)
    save_drafter(drafter, new_model(drafter_shape(CONFIG)).initialize(2), torch.float32)
    prompts.write_text('{"prompt_ids": [1]}\n')
    arguments = ["--model", str(model), "--prompts", str(prompts), "--max-tokens", "1", "--rounds", "1"]
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
        ({"target": own}, 0),
        ({}, 0),
        ({"policy_hash": "e" * 64}, 1),
        ({"target": "e" * 64}, 1),
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
    asked = [
        "--model",
        str(model),
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--max-tokens",
        "8",
        "--rounds",
        "1",
    ]
    found = []
    for folder in (drafter, tmp_path / "served"):
        assert cli.main(["drafter", "eval", str(folder), *asked, "--out", str(out)]) == 0
        printed = capsys.readouterr().out
        assert summarize(read_strictly(printed)).headline.startswith("accept length ")
        summary = read_strictly(out.read_text())
        assert read_strictly(printed.splitlines()[-1]) == summary
        assert summary["speedup"]["high"] is None, "one round tells no interval"
        found.append(summary["by_position"])
    assert found[0] == found[1]

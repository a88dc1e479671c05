"""Tiny models of families that our own decoder does not compute, in vLLM, judged by transformers' logits
and the law."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tests.side_by_side import answers, step_by_step
from tests.unit.apps.cli.parts import read_lines, save_tokenizer, succeed, write_lines
from tests.vllm.parts import (
    DEPTH,
    FOREIGN,
    SIZES,
    assert_lawful,
    in_vllm,
    make_checkpoint,
    repeating,
    requests_for,
    vllm_engine,
)
from tlt.apps.cli import main as cli
from tlt.base.types import Request, SamplingParams
from tlt.models.hf.weights import read_safetensors

pytestmark = in_vllm

REQUESTS = [*requests_for(SIZES["vocab_size"], 12, 3, (7,), longest=44), *repeating(2)]
WINDOW = SIZES["max_position_embeddings"]


@dataclass(frozen=True)
class Served:
    name: str
    model: Path
    engine: Any


@pytest.fixture(scope="module", params=FOREIGN)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param) / "model")
    engine = vllm_engine(model, f"ngram:{DEPTH}x1x{DEPTH}")
    yield Served(request.param, model, engine)
    engine.close()


def test_tokens_are_those_of_the_law_over_transformers_logits(served: Served) -> None:
    engine = served.engine
    engine.stats = type(engine.stats)()
    drafted = answers(engine, REQUESTS)
    assert engine.stats.num_drafted_tokens > 0
    plain = step_by_step(engine, REQUESTS, itertools.repeat(0))
    for found in (drafted, plain):
        assert_lawful(REQUESTS, found, served.model)


def test_a_response_ends_where_the_model_s_own_positions_do(served: Served) -> None:
    request = Request("window", 0, (9,) * (WINDOW - 5), SamplingParams(max_tokens=60, seed=4))
    found = answers(served.engine, [request])
    assert len(found["window", 0].token_ids) == 5
    assert_lawful([request], found, served.model)


def test_weights_that_are_pushed_are_those_that_answer(served: Served, tmp_path: Path) -> None:
    """Of another seed, greedy: hardly a token stays. A prompt longer than a block would show a cache that
    is not emptied."""
    engine, other = served.engine, make_checkpoint(served.name, tmp_path / "other", seed=8)
    requests = [
        Request(f"g{i}", 0, (9 + i, 20) * (1 + 30 * (i == 0)), SamplingParams(0.0, max_tokens=8))
        for i in range(6)
    ]
    before = answers(engine, requests)
    assert_lawful(requests, before, served.model)
    engine.load_policy(read_safetensors(other), 1)
    found = answers(engine, requests)
    assert_lawful(requests, found, other)
    assert sum(found[key].token_ids == before[key].token_ids for key in found) == 0
    engine.load_policy(read_safetensors(served.model), 2)
    again = answers(engine, requests)
    assert again == {key: dataclasses.replace(rollout, policy_version=2) for key, rollout in before.items()}


def test_a_policy_that_lacks_tensors_is_refused_by_the_name_of_one(served: Served) -> None:
    engine, whole = served.engine, read_safetensors(served.model)
    part = {name: tensor for name, tensor in whole.items() if "layers.3.mlp" not in name}
    with refused(r"^policy: has nothing for model\.layers\.3\.mlp\."):
        engine.load_policy(part, 3)
    engine.load_policy(whole, 4)
    assert_lawful(REQUESTS[:4], answers(engine, REQUESTS[:4]), served.model)


def test_the_commands_take_a_mixture_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint("qwen3-moe", tmp_path / "model")
    save_tokenizer(model)
    monkeypatch.chdir(tmp_path)
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"}, {"prompt": "12+34"}, {"prompt_ids": [3, 4, 5]})
    asked = (
        "--prompts",
        "prompts.jsonl",
        "--samples",
        "4",
        "--max-tokens",
        "30",
        "--engine",
        "vllm",
        "--compile",
        "false",
    )
    written = []
    for speculation in ("off", "ngram:4x1x4"):
        out = ("--out", "out.jsonl", "--speculation", speculation)
        assert succeed(capsys, "generate", str(model), *asked, *out)["responses"] == 12
        written.append([(record["token_ids"], record["text"]) for record in read_lines("out.jsonl")])
    assert written[0] == written[1]
    assert cli.main(["audit", "engine", str(model), *asked, "--speculation", "ngram:4x1x4"]) == 3, (
        "nothing is found in so few tokens"
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["lossless"] is None

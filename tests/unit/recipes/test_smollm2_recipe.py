"""The warm-up of the recipe smollm2: it learns solutions and neither prompts nor mistakes, of training
problems alone."""

from __future__ import annotations

import re
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from recipes.smollm2 import warm_up
from recipes.smollm2.arithmetic import Question
from tlt.base.io.recipes import find_recipe
from tlt.engine.build.model import load_model
from tlt.models.hf.tokenizer import load_tokenizer

BASE = find_recipe("math").with_name("base")
MATRIX = "model.layers.1.mlp.up_proj.weight"
WORDS = ["warm_up", "--base", str(BASE), "--batch", "2", "--rank", "2"]


def test_a_mistake_is_read_and_not_learned_and_the_end_is_learned() -> None:
    tokenizer = load_tokenizer(BASE)
    ids, labels = warm_up.encode(tokenizer, [("2 + 3 = ", True), ("6", False), ("\n#### 5", True)])
    assert tokenizer.decode(ids[:-1]) == "2 + 3 = 6\n#### 5"
    assert ids[-1] == labels[-1] == tokenizer.stop_ids[0]
    assert (
        tokenizer.decode([token for token in labels[:-1] if token != warm_up.IGNORED]) == "2 + 3 = \n#### 5"
    )


def test_documents_are_of_training_problems_and_no_prompt_is_learned() -> None:
    tokenizer = load_tokenizer(BASE)
    for document in islice(warm_up.documents(tokenizer, seed=0, mistakes=0.1), 50):
        num_read = document.labels.index(next(label for label in document.labels if label != warm_up.IGNORED))
        prompt = tokenizer.decode(document.token_ids[:num_read])
        numbers = tuple(map(int, re.findall(r"\d+", prompt.split("?")[0])))
        assert Question("+", numbers).split == "train"
        assert prompt.endswith("####.")
        assert re.search(rf"#### {sum(numbers)}$", tokenizer.decode(document.token_ids[:-1]))


def test_what_is_saved_is_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(num_documents: int) -> torch.Tensor:
        out = tmp_path / str(num_documents)
        monkeypatch.setattr(sys, "argv", [*WORDS, "--documents", str(num_documents), "--out", str(out)])
        warm_up.main()
        return load_model(BASE, torch.float32, out).tensors[MATRIX]

    base = load_model(BASE, torch.float32).tensors[MATRIX]
    few, many = ((train(num) - base).norm() for num in (2, 8))
    assert 0 < few < many
    assert capsys.readouterr().out.splitlines()[-1].startswith("4 of 4 steps, ")

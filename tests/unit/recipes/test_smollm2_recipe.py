"""The warm-up of the recipe smollm2: it learns solutions and neither prompts nor mistakes, of training
problems alone."""

from __future__ import annotations

import re
from itertools import islice

from recipes.smollm2 import warm_up
from recipes.smollm2.arithmetic import Question
from tlt.base.io.recipes import find_recipe
from tlt.models.hf.tokenizer import load_tokenizer

BASE = find_recipe("math").with_name("base")


def test_documents_are_of_training_problems_and_no_prompt_is_learned() -> None:
    tokenizer = load_tokenizer(BASE)
    for document in islice(warm_up.documents(tokenizer, seed=0, mistakes=0.1), 50):
        num_read = document.labels.index(next(label for label in document.labels if label != warm_up.IGNORED))
        prompt = tokenizer.decode(document.token_ids[:num_read])
        numbers = tuple(map(int, re.findall(r"\d+", prompt.split("?")[0])))
        assert Question("+", numbers).split == "train"
        assert prompt.endswith("####.")
        assert re.search(rf"#### {sum(numbers)}$", tokenizer.decode(document.token_ids[:-1]))

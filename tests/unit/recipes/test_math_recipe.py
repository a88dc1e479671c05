"""The recipe math: its model reads chat messages and solves the easiest of its problems; its curriculum
begins with them."""

from __future__ import annotations

import tlt
from recipes.math.word_problems import TASK
from tlt.base.io.recipes import find_recipe
from tlt.models.hf.tokenizer import load_tokenizer

BASE = find_recipe("math").with_name("base")


def test_digits_are_tokens_of_their_own_and_a_system_message_is_read() -> None:
    tokenizer = load_tokenizer(BASE)
    assert [tokenizer.decode([token]) for token in tokenizer.encode_text("27+105")] == list("27+105")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é?"}]
    pieces = tokenizer.hf.convert_ids_to_tokens(tokenizer.encode_chat(messages))
    assert pieces[0] == "<|system|>"
    assert pieces[-1] == "<|assistant|>"
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == "Be brief.é?"


def test_the_base_model_solves_most_problems_of_one_operation() -> None:
    problems = TASK.problems(32, 0, split="test", steps={1: 1.0}, max_number=12, max_result=30)
    responses = tlt.Engine.from_pretrained(BASE).generate(problems, temperature=0.0, max_tokens=64)
    by_id = {problem["problem_id"]: problem for problem in problems}
    solved = [TASK.score(by_id[response.problem_id], response.text)["solved"] for response in responses]
    assert sum(solved) > 16, "a broken template, tokenizer or model solves none"

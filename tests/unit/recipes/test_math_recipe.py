"""The recipe math: its model reads chat messages and solves the easiest of its problems; its curriculum
begins with them."""

from __future__ import annotations

import tlt
from recipes.math.train_base import difficulty_at
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


def test_the_curriculum_begins_with_one_operation_on_small_numbers_and_ends_with_what_was_asked_for() -> None:
    steps = {1: 0.3, 2: 0.4, 3: 0.3}
    first, last = (difficulty_at(progress, steps, max_number=30, max_result=99) for progress in (0.0, 1.0))
    assert (dict(first.steps), first.max_number) == ({1: 0.3}, 9)
    assert (dict(last.steps), last.max_number, last.max_result) == (steps, 30, 99)

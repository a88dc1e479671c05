"""The reward function and its test that `tlt init own` writes."""

EXACT = '''"""The reward of a response: 1.0 where its final answer is right. Change it as you like.

A response gives its answer after "Answer:" or "####", in a box, or as its last line: ask for it.
"""

import re

from tlt.tasks.answers import find_answer
from tlt.tasks.numbers import to_number
from tlt.base.thoughts import after_thinking

ANSWER_IS = r"((the |my )?((final|correct|right) )?answer( is)?)?"
LEAD_IN = re.compile(rf"(so|thus|hence|therefore|[,:])* *{ANSWER_IS} *[:=]* *", re.IGNORECASE)


def reward(completions, answer, in_thought=None, **kwargs):
    """Returns a reward for each response; every other column of the data comes by its name, too."""
    began = in_thought or [False] * len(completions)
    rows = zip(completions, answer, began, strict=True)
    return [float(says(text_of(completion), str(right), thinks)) for completion, right, thinks in rows]


def says(text, answer, in_thought=False):
    """Returns whether the answer that the text ends with is the right one: as a number, or word for word."""
    right = find_answer(answer) or answer
    if not plain(right):
        raise ValueError(f"the answer is {answer!r}: give one that can be said, or leave the row out")
    said = final_answer(after_thinking(text, in_thought=in_thought), num_lines=1 + right.count("\\n"))
    if (number := to_number(right)) is not None:
        return number in map(to_number, said)
    return plain(right) in map(plain, said)


def final_answer(text, num_lines):
    """Returns what the text marks as its answer, else its last lines, with and without "So the answer is"."""
    marked, last = find_answer(text), "\\n".join(text.strip().splitlines()[-num_lines:])
    return [last, LEAD_IN.sub("", last, count=1)] if marked is None else [marked]


def plain(text):
    """Returns the text in lower case, with single blanks, without punctuation around it."""
    return " ".join(text.casefold().split()).strip(" .,;:!?*_`'\\"()[]{}$")


def text_of(completion):
    """Returns the text of a completion, which is chat messages where the prompt is."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''

TO_FILL_IN = '''"""The reward of a response: fill in `worth`. From 1.0 on a response counts as solved."""


def reward(completions, **kwargs):
    """Returns a reward for each response; every column of the data comes by its name as a list, too."""
    return [worth(text_of(completion)) for completion in completions]


def worth(text):
    """Returns what a response is worth, from 0.0 to 1.0."""
    raise NotImplementedError("say in reward.py what a response is worth")


def text_of(completion):
    """Returns the text of a completion, which is chat messages where the prompt is."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''

TEST_HEAD = '''"""The reward on rows of the data, before a run trusts it: python test_reward.py, or pytest."""

import json
from pathlib import Path

from tlt.tasks.rewards.scoring import Completion, RewardSpec, Scorer

ROWS_FILE = Path(__file__).with_name("rows.jsonl")
ROWS = [json.loads(line) for line in ROWS_FILE.read_text(encoding="utf-8").split("\\n") if line]
SCORER = Scorer(RewardSpec("data", ["reward:reward"]))


def rewards_of(row, *texts):
    """Returns text → reward, as training computes it for a group of these responses."""
    scored = SCORER.score([Completion(row, text) for text in texts])
    for one in scored:
        assert one.is_scored, one.error
    return {text: one.value for text, one in zip(texts, scored, strict=True)}
'''

RIGHT_ANSWERS = '''

def right(row):
    """Returns a response with the row's answer."""
    return f"Answer: {row['answer']}"


def wrong(row):
    """Returns a response with the answer of another row, if one differs."""
    others = [right(other) for other in ROWS if right(other) != right(row)]
    return others[0] if others else "Answer: I do not know."
'''

RIGHT_TEXTS = '''

def right(row):
    """Returns a response that is right for the row."""
    return "write here what you want"


def wrong(row):
    """Returns a response that is wrong for the row."""
    return "write here what you do not want"
'''

TEST = """

def test_a_right_response_is_worth_more_than_a_wrong_one():
    for number, row in enumerate(ROWS, start=1):
        worth = rewards_of(row, right(row), wrong(row))
        print(f"row {number}:", ", ".join(f"{reward:g} for {text!r}" for text, reward in worth.items()))
        remedy = "correct the reward, or what right() and wrong() say in test_reward.py"
        told = f"row {number}: the right one is worth no more; {remedy}"
        assert worth[right(row)] > worth[wrong(row)], told


if __name__ == "__main__":
    test_a_right_response_is_worth_more_than_a_wrong_one()
    print(f"passed on {len(ROWS)} rows")
"""

"""The files that `tlt init own` writes for a reward: the function, and the test of it on rows of the data."""

EXACT = '''"""The reward of a response: 1.0 where its last line says the answer. Change it as you like."""

import re


def reward(completions, answer, **kwargs):
    """Returns a reward for each response; every other column of the data comes by its name, too."""
    return [float(says(text_of(c), str(a))) for c, a in zip(completions, answer, strict=True)]


def says(text, answer):
    """Returns whether the last line of the text says the answer, in upper or lower case."""
    last = text.strip().splitlines()[-1:]
    return bool(last and re.search(rf"(?<!\\w){re.escape(answer.strip())}(?!\\w)", last[0], re.IGNORECASE))


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

from tlt.rewards.scoring import Completion, RewardSpec, Scorer

ROWS = [json.loads(line) for line in Path(__file__).with_name("rows.jsonl").read_text().splitlines()]
SCORER = Scorer(RewardSpec("data", ["reward:reward"]))


def reward_of(row, text):
    """Returns the reward as training computes it."""
    scored = SCORER.score(Completion(row, text))
    assert scored.is_scored, scored.error
    return scored.value
'''

TESTS_ANSWERS = """

def test_the_answer_is_worth_more_than_another_text():
    for row in ROWS:
        assert reward_of(row, f"Therefore: {row['answer']}") > reward_of(row, "I do not know.")


if __name__ == "__main__":
    test_the_answer_is_worth_more_than_another_text()
    print(f"passed on {len(ROWS)} rows")
"""

TESTS_TEXTS = """

GOOD, BAD = "write here what you want", "write here what you do not want"


def test_a_good_response_is_worth_more_than_a_bad_one():
    for row in ROWS:
        assert reward_of(row, GOOD) > reward_of(row, BAD)


if __name__ == "__main__":
    test_a_good_response_is_worth_more_than_a_bad_one()
    print(f"passed on {len(ROWS)} rows")
"""

TESTS_NUMBERS = """

def test_every_row_gets_a_number():
    for row in ROWS:
        assert isinstance(reward_of(row, "a response"), float)


if __name__ == "__main__":
    test_every_row_gets_a_number()
    print(f"passed on {len(ROWS)} rows")
"""

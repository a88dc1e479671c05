"""The math task: records of the usual data sets in their own columns, where an answer is sought, and what
counts as equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.refused import refused
from tlt.base.thoughts import after_thinking
from tlt.tasks import math as math_task
from tlt.tasks.answers import Search, find_answer
from tlt.tasks.base import make_problems, prepare_records
from tlt.tasks.equivalence import is_equal, measure
from tlt.tasks.math import TASK, gold_answer, to_problem
from tlt.tasks.numbers import to_number
from tlt.tasks.rewards.pool import RewardPool
from tlt.tasks.rewards.scoring import RewardSpec

DAPO_PROMPT = (
    'Solve step by step. What is 2+2?\n\nRemember to put your answer on its own line after "Answer:".'
)
GSM8K = {
    "question": "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?",
    "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\nAltogether 48+24 = <<48+24=72>>72.\n#### 1,072",
}
MATH = {
    "problem": r"Simplify $\sqrt{18}$.",
    "level": "Level 2",
    "type": "Algebra",
    "solution": r"As $18=\boxed{9}\cdot 2$, it is $3\sqrt{2}=\boxed{3\sqrt{2}}$.",
}
MATH_500 = {
    "problem": "Convert $(0,3)$ to polar coordinates.",
    "solution": r"We find $\boxed{\left( 3, \frac{\pi}{2} \right)}.$",
    "answer": r"\left( 3, \frac{\pi}{2} \right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": DAPO_PROMPT, "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
EURUS = {
    "data_source": "numina_synthetic_math",
    "prompt": [
        {"content": "When tackling complex reasoning tasks, …", "role": "system"},
        {"content": "What is half of one?\n\nPresent the answer in LaTex format: \\boxed{}", "role": "user"},
    ],
    "ability": "math",
    "reward_model": {"ground_truth": r"\frac{1}{2}", "style": "rule"},
    "extra_info": {"index": 0, "split": "dummy"},
}
EURUS_CODE = {
    **EURUS,
    "ability": "code",
    "reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": ["2"]}', "style": "rule"},
}
WORDS = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1_000,
    r"\text{ million}": 1_000_000,
    "billion": 1_000_000_000,
    "trillion": 1_000_000_000_000,
}
TRL = {"prompt": "What is 1+1?", "solution": "$2$"}


@pytest.mark.parametrize(
    ("record", "question", "answer"),
    [
        (GSM8K, GSM8K["question"], "1,072"),
        (MATH, MATH["problem"], r"3\sqrt{2}"),
        (MATH_500, MATH_500["problem"], r"\left( 3, \frac{\pi}{2} \right)"),
        (TRL, TRL["prompt"], "$2$"),
    ],
    ids=["GSM8K", "MATH", "MATH-500", "TRL"],
)
def test_a_record_with_a_question_is_asked_by_the_template(
    record: dict[str, Any], question: str, answer: str
) -> None:
    problem = to_problem(record)
    instruction = r"Let's think step by step and output the final answer within \boxed{}."
    assert problem["prompt"] == f"{question} {instruction}"
    assert problem["answer"] == answer
    assert "messages" not in problem
    assert to_problem(record, "Q: {question}\nA:")["prompt"] == f"Q: {question}\nA:"


@pytest.mark.parametrize(("record", "answer"), [(DAPO, "4"), (EURUS, r"\frac{1}{2}")], ids=["DAPO", "Eurus"])
def test_a_record_of_verls_columns_is_asked_in_its_own_words(record: dict[str, Any], answer: str) -> None:
    problem = to_problem(record)
    assert problem["messages"] == record["prompt"]
    assert problem["answer"] == answer
    assert "prompt" not in problem


def test_the_answer_of_a_problem_is_the_answer_of_its_record_and_a_problem_is_prepared_once() -> None:
    for record in (GSM8K, MATH, MATH_500, DAPO, EURUS, TRL):
        problem = TASK.prepare(record, {})
        assert problem == to_problem(record)
        assert gold_answer(problem) == gold_answer(record)
        assert TASK.prepare(problem, {}) == problem


@pytest.mark.parametrize(
    ("record", "remedy"),
    [
        ({"question": "1+1?"}, "no answer among the columns"),
        ({"answer": "2"}, "no question among the columns"),
        ({"question": "1+1?", "answer": None}, "no answer among the columns"),
        ({"question": "1+1?", "answer": ["2"]}, "must be text that holds the answer"),
        ({"question": "1+1?", "answer": float("nan")}, "must be text that holds the answer"),
        ({"question": "1+1?", "answer": "…"}, "must be text that holds the answer"),
        ({"prompt": "1+1?", "answer": None, "search": "marked"}, "no answer among the columns"),
        ({"prompt": "1+1?", "answer": "2", "search": "nowhere"}, "search is 'nowhere'; use one of boxed"),
        ({"question": 2, "answer": "2"}, "must be text or chat messages"),
        ({"prompt": ["1+1?"], "answer": "2"}, "must be text or chat messages"),
        ({"problem": "1+1?", "solution": "We add one and one. " * 20}, "marks no answer"),
        ({**DAPO, "reward_model": {"style": "rule"}}, "reward_model.ground_truth is None"),
        (EURUS_CODE, "ability is 'code', not math"),
    ],
)
def test_a_record_that_cannot_be_asked_or_scored_is_refused(record: dict[str, Any], remedy: str) -> None:
    with refused(remedy):
        TASK.prepare(record, {})


@pytest.mark.parametrize(
    ("text", "boxed", "marked", "last"),
    [
        (r"so \boxed{\frac{1}{\sqrt{2}}}.", *[r"\frac{1}{\sqrt{2}}"] * 3),
        (r"\boxed{1} then \boxed{2}", "2", "2", "2"),
        (r"\boxed{1} then \boxed{2", "1", "1", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", r"\{1, 2\}", r"\{1, 2\}"),
        (r"\boxed 5$", "5", "5", "5"),
        ("12+7=19\n#### 19", None, "19", "19"),
        ("Answer: 3\nno.\nAnswer: 4.", None, "4", "4"),
        ("**Answer:** 1/2", None, "1/2", "1/2"),
        (r"Answer: $\boxed{7}$", "7", "7", "7"),
        ("\\boxed{7}\nAnswer: 8", "7", "8", "8"),
        ("Answer: 8\n\\boxed{7}", "7", "7", "7"),
        ("It is 3, or rather -1,234.5.", None, None, "-1,234.5"),
        ("Nothing.", None, None, None),
    ],
)
def test_an_answer_is_found_by_its_mark_and_only_if_asked_for_as_the_last_number(
    text: str, boxed: str | None, marked: str | None, last: str | None
) -> None:
    assert [find_answer(text, search) for search in get_args(Search)] == [boxed, marked, last]


def test_the_last_number_has_all_its_commas_and_no_minus_of_a_difference() -> None:
    texts = ("10-5", "a -5", "12,34", "1,2345", "so 1,000,000.", "1.5e3", "x=-.5", "from 5-7")
    found = [find_answer(text, "any") for text in texts]
    assert found == ["5", "-5", "12,34", "1,2345", "1,000,000", "1.5e3", "-.5", "7"]


def test_what_was_thought_is_no_answer() -> None:
    assert after_thinking(r"<think>\boxed{1}</think> 2", "</think>") == " 2"
    assert after_thinking(r"\boxed{1}</think> 2", "</think>") == " 2"  # the template opened the tag
    assert after_thinking(r"<think> cut off \boxed{1}", "</think>") == ""
    assert after_thinking(r"Well. <think> cut off \boxed{1}") == ""
    assert after_thinking(r"<think>a</think> 2 <think> again \boxed{1}") == ""
    assert after_thinking(r"<think>a</think> 2 <think>b</think> 3") == " 3"
    assert after_thinking(r"cut off \boxed{1}", in_thought=True) == ""
    assert after_thinking(r"\boxed{1}</think> 2", in_thought=True) == " 2"
    for opening, closing in (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")):
        assert after_thinking(f"{opening}1{closing} 2") == " 2"
        assert after_thinking(f"{opening}1") == ""
    assert after_thinking("no thought", "</think>") == "no thought"
    assert after_thinking("<think> all of it", "") == "<think> all of it"


def test_a_plain_number_is_read_exactly() -> None:
    plain = {
        "-1,234.5": "-2469/2",
        "3/4": "3/4",
        r"\$12": "12",
        "0.75.": "3/4",
        "15.0": "15",
        "\u22125": "-5",
    }
    plain |= {r"1\,234": "1234", "1{,}234": "1234", "1 234 567": "1234567", "1,234/5": "1234/5"}
    plain |= {"3 1/2": "7/2", "-3 1/2": "-7/2", "1e5": "100000", "2.5e-1": "1/4", ".5": "1/2", "5.": "5"}
    assert {text: str(to_number(text)) for text in plain} == plain
    none = ["", "x", "1/0", "1 2", "--1", "1/2/3", "12 apples", "9" * 5000, "1e99999"]
    none += ["1,2", "12,34", "0,0", "1,2345", "1,234,56", "0,123", "1.234,567", r"1\,2"]
    assert {text[:9]: to_number(text) for text in none} == {text[:9]: None for text in none}


# ------------------------------------------------------------------------------------------------------------
# Problems of a file


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def questions(num: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {i}+1?", "answer": f"#### {i + 1}"} for i in range(num)]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_task, "require_math_verify", lambda: None)


@pytest.mark.usefixtures("installed")
def test_one_file_is_split_by_its_questions_and_two_files_are_kept_apart(tmp_path: Path) -> None:
    file = write(tmp_path / "all.jsonl", *questions(400))
    ids = {}
    for split in ("train", "test"):
        made = make_problems("math", 1000, 0, {"split": split, "train": file})
        ids[split] = {problem["problem_id"] for problem in made}
    assert len(ids["train"] | ids["test"]) == len(ids["train"]) + len(ids["test"]) == 400
    assert 20 < len(ids["test"]) < 90
    other = {"split": "test", "train": file, "template": "{question}"}
    assert len(make_problems("math", 1000, 0, other)) == len(
        ids["test"]
    )  # another template moves no question
    test = write(tmp_path / "test.jsonl", *questions(3))
    assert len(make_problems("math", 1000, 0, {"split": "test", "train": file, "test": test})) == 3
    assert len(make_problems("math", 1000, 0, {"split": "train", "train": file, "test": test})) == 400


@pytest.mark.usefixtures("installed")
def test_a_seed_draws_which_problems_and_repeated_records_count_once(tmp_path: Path) -> None:
    file = write(tmp_path / "all.jsonl", *questions(50) * 3)
    first, again, other = (
        make_problems("math", 10, seed, {"split": "train", "train": file}) for seed in (0, 0, 1)
    )
    assert first == again != other
    test = write(tmp_path / "again.jsonl", *[DAPO] * 3)
    assert len(make_problems("math", 10, 0, {"split": "test", "train": file, "test": test})) == 1


@pytest.mark.usefixtures("installed")
def test_records_of_code_are_refused_or_on_request_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "eurus.jsonl", EURUS, EURUS_CODE, DAPO)
    options = {"split": "train", "train": file, "test": file}
    with refused(r"eurus.jsonl:2: task math: ability is 'code', not math"):
        make_problems("math", 10, 0, options)
    kept = make_problems("math", 10, 0, {**options, "other": "skip"})
    assert {problem["answer"] for problem in kept} == {"4", r"\frac{1}{2}"}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"search": "last"}, "search is 'last'; use one of boxed, marked, any"),
        ({"other": "keep"}, "other is 'keep'; use one of refuse, skip"),
        ({"template": "x"}, "put {question} where the question goes"),
        ({"tempalte": "x"}, "takes no option 'tempalte'"),
        ({"train": "nowhere.jsonl"}, "task.options.train: nowhere.jsonl does not exist"),
        ({"split": "dev"}, "use one of"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    file = write(tmp_path / "all.jsonl", *questions(10))
    with refused(remedy):
        make_problems("math", 10, 0, {"split": "train", "train": file, **options})


def test_without_math_verify_the_task_says_what_to_install_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused(r"pip install 'math-verify"):
        make_problems("math", 1, 0, {"split": "train", "train": write(tmp_path / "all.jsonl", GSM8K)})


# ------------------------------------------------------------------------------------------------------------
# Scoring, with math-verify itself


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("72", "72", True),
        ("1,072", "1072", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"3\sqrt{2}", r"\sqrt{18}", True),
        ("x^2+1", "1+x^2", True),
        ("5", "x=5", True),
        ("72", r"72\text{ dollars}", True),
        ("$10$", "10", True),
        ("10", "$x = 10$", True),
        ("72", "73", False),
        ("5", "5, 6", False),
        ("(1,2)", "(2,1)", False),
        ("5", "", False),
        ("5", r"\frac{", False),
        ("1234", r"1\,234", True),
        ("18", "18 dollars", True),
        ("18 dollars", "18 cents", False),
        ("5", "5 million", False),
        *((str(5 * scale), f"5 {word}", True) for word, scale in WORDS.items()),
        ("2", "3 1/2", False),
        ("1.6e-19", r"1.6\times 10^{-19}", True),
        ("1.6e-19", "9.1e-31", False),
        (r"1.6\times 10^{-19}\pi", r"9.1\times 10^{-31}\pi", False),
        (r"\{1.6e-19\}", r"\{9.1e-31\}", False),
        ("x=1.0000001", "x=1.0000002", False),
        ("1.0000001", "1.0000002", False),
        ("(1.0000001, 2)", "(1.0000002, 2)", False),
        ("1/2004!", "1/2006!", False),
        ("1/2004!", r"\frac{1}{2004!}", True),
        ("e^{-50}", "e^{-60}", False),
        ("x^2", "x^2+10^{-20}", False),
        (r"\frac{1}{3}", "0.333333", True),
        (r"\frac{1}{3}", "0.3333", False),
        (r"\frac{1}{3}\times 10^{-9}", "0.333334e-9", False),
        (r"\sqrt{2}", "1.414214", True),
        ("7", "7.0000001", False),
        ("123456789012345678", "123456789012345679", False),
        ("5", "5, 5", False),
        ("0,0", "0", False),
        ("1,2", "12", False),
        ("50\\%", "0.5", True),
        ("0.00001\\%", "0.00003\\%", False),
        ("Evelyn", r"\text{Evelyn}", True),
        ("listen", "silent", False),
    ],
)
def test_answers_are_compared_as_mathematics(gold: str, answer: str, expected: bool) -> None:
    pytest.importorskip("math_verify")
    assert is_equal(gold, answer) == expected


def test_a_scaled_number_is_written_out() -> None:
    written = {
        text: measured.as_latex()
        for text in ("1.1 dozen", "2.5 million", "0.05")
        if (measured := measure(text))
    }
    assert written == {"1.1 dozen": r"\frac{66}{5}", "2.5 million": "2500000", "0.05": "0.05"}


def test_a_gold_answer_that_is_no_mathematics_is_said() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="leave the problem out"):
        is_equal("", "1")


def test_every_data_sets_records_are_scored_through_a_pool_whose_time_out_ends_what_never_would() -> None:
    """math-verify sets no alarm, so a worker that hangs in sympy is killed from outside; the next response
    is scored again."""
    pytest.importorskip("math_verify")
    with RewardPool(RewardSpec("math"), num_workers=1, timeout_seconds=3.0) as pool:
        responses = {
            "GSM8K": (GSM8K, "#### 1072", True),
            "endless": ({"answer": "5"}, r"\boxed{9^{9^{9^{9^9}}}}", None),
            "MATH": (MATH, r"\boxed{\sqrt{18}}", True),
            "DAPO": (DAPO, "So it is 4.\nAnswer: 4", True),
            "Eurus": (EURUS, r"\boxed{0.5}", True),
            "wrong": (DAPO, "Answer: 5", False),
            "unmarked": (DAPO, "It is 4.", False),
        }
        for name, (problem, text, _) in responses.items():
            pool.submit((name, 0), problem, text)
        rewards = pool.drain(patience=60.0)
    for name, (_, _, expected) in responses.items():
        reward = rewards[name, 0]
        assert (reward.is_solved if reward.is_scored else None) == expected, (name, reward)


def test_the_tasks_options_hold_for_rows_of_data_too() -> None:
    problem = TASK.prepare(GSM8K, {"template": "Q: {question}\nA:", "search": "any"})
    assert problem == to_problem(GSM8K, "Q: {question}\nA:", "any")
    assert TASK.prepare(EURUS_CODE, {"other": "skip"}) is None
    with refused("search is 'nowhere'; use one of"):
        TASK.prepare(GSM8K, {"search": "nowhere"})
    with refused("takes no option 'tempalte' with data; known ones are template"):
        TASK.prepare(GSM8K, {"tempalte": "{question}"})


def test_rows_of_data_that_repeat_a_problem_count_once_and_equal_ids_of_others_are_still_refused() -> None:
    row = {"question": "What is 1 + 1?", "answer": "2"}
    rows = [(f"f:{n}", {"problem_id": str(n), **row, "level": n}) for n in (1, 2)]
    assert [place for place, _ in prepare_records("math", rows, {})] == ["f:1"]
    clash = [
        (f"f:{n}", {"problem_id": "mine", "prompt": str(n), "answer": "2", "search": "boxed"}) for n in (1, 2)
    ]
    assert prepare_records("math", clash, {}) == clash


def test_other_columns_of_a_row_stay_but_no_second_prompt() -> None:
    row = {
        **GSM8K,
        "prompt": "again",
        "level": 3,
        "thinking_ends": "</t>",
        "images": ["a.png"],
        "ability": "math",
    }
    problem = to_problem(row)
    kept = {"level": 3, "thinking_ends": "</t>", "images": ["a.png"], "ability": "math"}
    assert problem.items() >= kept.items()
    assert "question" not in problem
    assert problem["prompt"].startswith("Natalia")
    assert TASK.find(problem, r"\boxed{1}</t> \boxed{2}") == "2"
    with refused("thinking_ends is 7; give the tag"):
        to_problem({**GSM8K, "thinking_ends": 7})


def test_a_response_that_opens_boxes_without_end_is_read_in_one_pass() -> None:
    opened = r"\boxed{" * 100_000
    assert find_answer(opened) is None
    assert find_answer(r"\boxed{7}" + opened) == "7"
    assert find_answer(opened + "8}") == "8"
    assert find_answer(r"} \boxed{a{b}\}} {") == r"a{b}\}"

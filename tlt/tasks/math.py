"""Mathematics with known answers: records of the usual data sets (docs/math.md), scored by math-verify.

`rewards.timeout_seconds` bounds math-verify's time, sympy's C code included. With `rewards.num_workers = 0`
nothing does: an answer such as `9^{9^{9^9}}` may stop the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from tlt.base.io.data import PROMPTS
from tlt.base.io.files import Record, read_jsonl
from tlt.base.types import UserError
from tlt.base.value_types import shorten
from tlt.tasks.answers import Search, find_answer
from tlt.tasks.equivalence import is_equal, require_math_verify
from tlt.tasks.exact import ExactTask, check_columns
from tlt.tasks.numbers import gold_text
from tlt.tasks.splits import check_split, digest, split_of

QUESTION_COLUMNS = ("question", "problem", "prompt")
"""The first that a record has counts."""
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")
"""The first that a record has counts, after verl's reward_model."""
_READ = {*QUESTION_COLUMNS, *ANSWER_COLUMNS, *PROMPTS, "reward_model"}
"""Columns that a problem has under other names, or that would be a second prompt."""
INSTRUCTION = r"{question} Let's think step by step and output the final answer within \boxed{}."
LONGEST_ANSWER = 200
"""Characters; a longer text without a mark is a derivation."""
Other = Literal["refuse", "skip"]


def to_problem(record: Record, template: str = INSTRUCTION, search: Search = "marked") -> Record:
    """The id is a digest of prompt and answer. Only questions that are text go into `template`. Raises
    UserError for a record without question or answer, or of another subject."""
    if not is_mathematics(record):
        raise UserError(f"task math: ability is {record['ability']!r}, not math; leave the record out")
    column, text = _answer_column(record)
    if find_answer(text, "marked") is None and len(text) > LONGEST_ANSWER:
        what = f"{shorten(text)}; leave it out"
        raise UserError(f"task math: {column} marks no answer by \\boxed{{}}, #### or Answer: {what}")
    question, answer = question_of(record), gold_answer(record)
    prompt = (
        {"prompt": template.replace("{question}", question.strip())}
        if isinstance(question, str)
        else {"messages": question}
    )
    identity = digest(f"{prompt}\n{answer}")
    others = {name: value for name, value in record.items() if name not in _READ}
    problem = {**others, "problem_id": f"math-{identity}", **prompt, "answer": answer, "search": search}
    check_columns(problem)
    return problem


def is_mathematics(record: Mapping[str, Any]) -> bool:
    """Reads verl's column `ability`."""
    return str(record.get("ability") or "math").lower().startswith("math")


def question_of(record: Mapping[str, Any]) -> str | list[Record]:
    column = next((column for column in QUESTION_COLUMNS if record.get(column)), None)
    if column is None:
        remedy = f"name it one of {', '.join(QUESTION_COLUMNS)}"
        raise UserError(f"task math: no question among the columns {sorted(record)}; {remedy}")
    question = record[column]
    if isinstance(question, str):
        return question
    if isinstance(question, list) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in question
    ):
        return question
    raise UserError(f"task math: {column} is {shorten(question)}; it must be text or chat messages")


def gold_answer(record: Mapping[str, Any]) -> str:
    """The marked answer, else the whole text."""
    _, text = _answer_column(record)
    return find_answer(text, "marked") or text.strip()


def _answer_column(record: Mapping[str, Any]) -> tuple[str, str]:
    if isinstance(model := record.get("reward_model"), Mapping):
        column, text = "reward_model.ground_truth", model.get("ground_truth")
    else:
        column, text = next(((c, record[c]) for c in ANSWER_COLUMNS if record.get(c) is not None), ("", None))
    if not column:
        remedy = f"name it one of {', '.join(ANSWER_COLUMNS)}"
        raise UserError(f"task math: no answer among the columns {sorted(record)}; {remedy}")
    answer = gold_text(text)
    if answer is None or not any(map(str.isalnum, answer)):
        raise UserError(f"task math: {column} is {shorten(text)}; it must be text that holds the answer")
    return column, answer


# ------------------------------------------------------------------------------------------------------------
# The task


class Math(ExactTask):
    name = "math"

    def problems(
        self,
        num: int,
        seed: int,
        *,
        split: str = "train",
        train: str,
        test: str | None = None,
        template: str = INSTRUCTION,
        search: Search = "marked",
        other: Other = "refuse",
    ) -> list[Record]:
        """Gives up to `num` problems. Equal problems count once.

        train      JSONL of records, relative to the working directory
        test       JSONL of held-out records; default: one question in eight of `train`, chosen by its text
        template   the prompt, with {question} in it; chat messages stay as they are
        search     where a response has its answer: boxed, marked or any (answers.py)
        other      records whose `ability` is not math, such as Eurus-2-RL's code: refuse or skip
        """
        require_math_verify()
        checked = check_split(self.name, split)
        _check_options(template, search, other)
        file, option = (train, "train") if test is None or checked == "train" else (test, "test")
        problems = {}
        for place, record in read_jsonl(Path(file), f"task.options.{option}"):
            if other == "skip" and not is_mathematics(record):
                continue
            try:
                problem = to_problem(record, template, search)
            except UserError as error:
                raise UserError(f"{place}: {error}") from None
            if test is not None or split_of(str(question_of(record))) == checked:
                problems[problem["problem_id"]] = problem
        chosen = [problems[problem_id] for problem_id in sorted(problems)]
        self.rng(split, seed).shuffle(chosen)
        return chosen[:num]

    def prepare(self, record: Record, options: Mapping[str, Any]) -> Record | None:
        defaults = {"template": INSTRUCTION, "search": "marked", "other": "refuse"}
        if unknown := set(options) - set(defaults):
            remedy = "known ones are template, search and other"
            raise UserError(f"task math: takes no option {min(unknown)!r} with data; {remedy}")
        template, search, other = {**defaults, **options}.values()
        _check_options(template, search, other)
        if other == "skip" and not is_mathematics(record):
            return None
        if "search" not in record:
            return to_problem(record, template, search)
        self.check(record)
        return record

    def check(self, problem: Record) -> None:
        gold_answer(problem)
        check_columns(problem)

    def warm_up(self, options: Mapping[str, Any]) -> None:
        is_equal("x+1", "1+x")

    def is_right(self, problem: Record, answer: str) -> bool:
        return is_equal(gold_answer(problem), answer)


def _check_options(template: str, search: str, other: str) -> None:
    if "{question}" not in template:
        raise UserError(f"task math: template is {template!r}; put {{question}} where the question goes")
    for name, value, choices in (("search", search, get_args(Search)), ("other", other, get_args(Other))):
        if value not in choices:
            raise UserError(f"task math: {name} is {value!r}; use one of {', '.join(choices)}")


TASK = Math()

r"""Mathematics with known answers: records of the usual data sets become prompts, responses are scored by math-verify.

    GSM8K                 question, answer ("… #### 42")
    MATH, MATH-500        problem, solution ("… \boxed{42} …"), perhaps answer; level, type
    DAPO-17k, Eurus-2-RL  data_source, prompt (messages), ability, reward_model.ground_truth, extra_info (verl's columns)
    TRL's                 prompt (text or messages), and answer or solution

Knows records and text, not models. math-verify and sympy are imported when a reward worker starts. math-verify would
bound its own time with SIGALRM; here the reward worker's process has the time-out (`rewards.timeout_seconds`), which holds for
sympy's C code, too. With `rewards.num_workers = 0` there is none: an answer such as `9^{9^{9^9}}` may then stop the run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from tlt.files import Record, read_jsonl
from tlt.tasks.answers import Search, after_thinking, find_answer
from tlt.tasks.splits import check_split, split_of
from tlt.types import UserError

QUESTIONS = ("question", "problem", "prompt")
ANSWERS = ("answer", "solution", "ground_truth")
"""Columns that hold the question and the answer, the first of them that is there. verl's reward_model goes before."""
INSTRUCTION = r"{question} Let's think step by step and output the final answer within \boxed{}."
LONGEST_ANSWER = 200
"""Characters of an answer that stands alone; a longer text without a mark is a derivation."""
Other = Literal["refuse", "skip"]


@dataclass(frozen=True)
class Prompting:
    """How a question is asked. A record whose prompt is messages already is asked as it is, but for `system`."""

    template: str = INSTRUCTION
    """Text with `{question}` in it."""
    system: str | None = None
    """System message, which replaces that of a record; None: the record's, if it has one."""
    chat: bool = True
    """Whether the prompt is chat messages for the tokenizer's template, or plain text."""

    def __post_init__(self) -> None:
        if "{question}" not in self.template:
            raise UserError(f"task math: template {self.template!r} has no {{question}} in it; put it where the question goes")
        if self.system is not None and not self.chat:
            raise UserError("task math: system needs messages, which chat = false excludes; remove one of the two")


DEFAULT_PROMPTING = Prompting()


def to_problem(record: Record, place: str, prompting: Prompting = DEFAULT_PROMPTING) -> Record:
    """Returns the problem that a data set's record states: its id (a digest of what follows), its prompt and its answer."""
    column, text = _answer_column(record, place)
    if find_answer(text, "marked") is None and len(text) > LONGEST_ANSWER:
        raise UserError(
            f"{place}: {column} marks no answer (\\boxed{{}}, #### or Answer:): {_short(text)}; leave the record out"
        )
    answer = gold_answer(record, place)
    prompt = _ask(_question(record, place), prompting, place)
    digest = hashlib.blake2b(f"{prompt}\n{answer}".encode(), digest_size=8).hexdigest()
    return {"problem_id": f"math-{digest}", **prompt, "answer": answer}


def gold_answer(record: Mapping[str, Any], place: str = "problem") -> str:
    r"""Returns the record's answer: what its text marks by `####`, `\boxed{}` or `Answer:`, else the whole text."""
    _, text = _answer_column(record, place)
    return find_answer(text, "marked") or text.strip()


def _answer_column(record: Mapping[str, Any], place: str) -> tuple[str, str]:
    """Returns the column that holds the answer, and its text."""
    if isinstance(model := record.get("reward_model"), Mapping):
        column, text = "reward_model.ground_truth", model.get("ground_truth")
    else:
        column, text = next(((c, record[c]) for c in ANSWERS if record.get(c) is not None), ("", None))
    if not column:
        raise UserError(f"{place}: has no answer among its columns {sorted(record)}; name it one of {', '.join(ANSWERS)}")
    if isinstance(text, int | float) and not isinstance(text, bool):
        text = str(text)
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{place}: {column} is {_short(text)}; it must be text that holds the answer")
    return column, text


def _question(record: Record, place: str) -> Any:
    for column in QUESTIONS:
        if record.get(column):
            return record[column]
    raise UserError(f"{place}: has no question among its columns {sorted(record)}; name it one of {', '.join(QUESTIONS)}")


def _ask(question: Any, prompting: Prompting, place: str) -> Record:
    """Returns `messages` or `prompt`."""
    if isinstance(question, str):
        text = prompting.template.replace("{question}", question.strip())
        messages: list[Any] = [{"role": "user", "content": text}]
        if not prompting.chat:
            return {"prompt": text}
    elif isinstance(question, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in question):
        messages = [{"role": m["role"], "content": m["content"]} for m in question]
        if not prompting.chat:
            raise UserError(f"{place}: its prompt is chat messages, which chat = false excludes; set it to true")
    else:
        raise UserError(f"{place}: the question is {_short(question)}; it must be text or chat messages")
    if prompting.system is not None:
        messages = [m for m in messages if m["role"] != "system"]
        messages.insert(0, {"role": "system", "content": prompting.system})
    return {"messages": messages}


def keep_mathematics(records: Iterable[tuple[str, Record]], other: Other) -> list[tuple[str, Record]]:
    """Returns the records whose `ability`, if they have one, is math. Raises UserError for others unless they are skipped."""
    kept = []
    for place, record in records:
        ability = record.get("ability")
        if ability is None or str(ability).lower().startswith("math"):
            kept.append((place, record))
        elif other == "refuse":
            raise UserError(f"{place}: ability is {ability!r}, not math; task.options.other = 'skip' leaves such records out")
    return kept


# --------------------------------------------------------------------------------------------------------------------
# Scoring


def is_equal(gold: str, answer: str) -> bool:
    """Whether an answer equals the gold one as mathematics. Raises ValueError for a gold one that math-verify cannot read."""
    parse, verify = _math_verify()
    expected = _parsed(gold)
    if not expected:
        raise ValueError(f"the answer {gold!r} is no mathematics that math-verify can read; leave the problem out")
    return bool(verify(expected, parse(_as_latex(answer)), timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parsed(gold: str) -> Any:
    return _math_verify()[0](_as_latex(gold))


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Callable[[str], Any], Callable[..., bool]]:
    """Returns (parse, verify), of which neither sets an alarm."""
    require_math_verify()
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that nothing bounds its time: the worker's pool does
    targets = (math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig())
    return lambda text: math_verify.parse(text, targets, parsing_timeout=None), math_verify.verify


def _as_latex(answer: str) -> str:
    """Returns the answer as math-verify finds it: in its own delimiters where it has some, else boxed."""
    return answer if "$" in answer.replace("\\$", "") or "\\(" in answer else f"\\boxed{{{answer}}}"


def require_math_verify() -> None:
    """Raises UserError where math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("task math: math-verify is not installed; pip install 'tlt-rl[math]'")


# --------------------------------------------------------------------------------------------------------------------
# The task


@dataclass(frozen=True)
class Math:
    """The task `math` (see `tlt.tasks.base.Task`)."""

    def problems(
        self,
        num: int,
        seed: int,
        *,
        split: str = "train",
        train: str,
        test: str | None = None,
        prompting: Mapping[str, Any] | None = None,
        search: Search = "marked",
        other: Other = "refuse",
    ) -> list[Record]:
        r"""Returns up to `num` problems of a file of records, in an order drawn by `seed`. Equal problems count once.

        train       JSONL of records to train on, relative to the working directory
        test        JSONL of held-out records; without it one question in eight of `train` is held out, by its text
        prompting   template, system, chat (see `Prompting`)
        search      where a response is sought for its answer: boxed, marked or any (see tlt/tasks/answers.py)
        other       records whose `ability` is not math, such as the code of Eurus-2-RL: refuse or skip
        """
        require_math_verify()
        checked = check_split("math", split)
        _check_choice("search", search, get_args(Search))
        _check_choice("other", other, get_args(Other))
        file = test if test is not None and checked == "test" else train
        records = keep_mathematics(read_jsonl(Path(file), f"task.options.{'test' if file == test else 'train'}"), other)
        settings = make_prompting(prompting or {})
        problems = {}
        for place, record in records:
            problem = to_problem(record, place, settings)
            if test is not None or split_of(str(_question(record, place))) == checked:
                problems[problem["problem_id"]] = {**problem, "search": search}
        chosen = sorted(problems.values(), key=lambda problem: str(problem["problem_id"]))
        random.Random(f"math {split} {seed}").shuffle(chosen)
        return chosen[:num]

    def warm_up(self, options: Mapping[str, Any]) -> None:
        """Imports math-verify and sympy, which takes a second or more, and has them read a first answer."""
        is_equal("1", "1")

    def score(self, problem: Mapping[str, Any], response_text: str) -> dict[str, Any]:
        """Rewards 1.0 when the response's answer, sought after any thinking, equals the problem's as mathematics, else 0.0.

        A problem of one's own needs an answer in a column that `gold_answer` knows; `search` and `thinking_ends` (the tag
        after which the answer is sought; "" for a model without one) are optional.
        """
        tag = problem.get("thinking_ends", "</think>")
        text = after_thinking(response_text, tag) if tag else response_text
        answer = find_answer(text, problem.get("search", "marked"))
        solved = answer is not None and is_equal(gold_answer(problem), answer)
        return {"reward": float(solved), "solved": solved}


def make_prompting(settings: Mapping[str, Any]) -> Prompting:
    """Returns the settings as `Prompting`. Raises UserError for an unknown one."""
    if unknown := settings.keys() - Prompting.__dataclass_fields__.keys():
        known = ", ".join(Prompting.__dataclass_fields__)
        raise UserError(f"task math: prompting has no {', '.join(sorted(unknown))}; known are {known}")
    return Prompting(**settings)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"task math: {name} is {value!r}; use one of {', '.join(choices)}")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


TASK = Math()

"""The generators of reasoning-gym as tasks, scored by their own score_answer.

    --task.name reasoning-gym:chain_sum --task.options.max_terms 4

A problem records how to make it again, since some metadata do not survive JSON. Its text determines its
split, since a generator may repeat itself under another seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from tlt.base.io.extras import how_to_install
from tlt.base.thoughts import after_thinking
from tlt.base.types import UserError
from tlt.tasks.answers import find_answer
from tlt.tasks.drawing import draw_alike
from tlt.tasks.splits import TEST_ONE_IN, Split, check_split, digest, split_of

TEMPLATES = {
    "tag": "{question}\n\nGive the final answer between <answer> and </answer>.",
    "boxed": "{question}\n\nPut the final answer into \\boxed{}.",
    "whole": "{question}",
}

OWN_OPTIONS = ("answer_in", "template", "solved_at")
NO_OPTIONS = ("seed", "size")
"""Users do not set these fields of a generator's configuration."""
WRONGLY_SCORED = ("coin_flip", "game_of_life_halting", "puzzle24")
"""At 0.1.25 the library pays "0" for any chance, any text for a game that halts or not, and one solution
for all puzzles."""


class Drawn(NamedTuple):
    question: str
    answer: str | None
    """None: the generator has none."""
    made_by: dict[str, Any]


class ReasoningGym:
    """Raises UserError for an unknown name."""

    def __init__(self, name: str) -> None:
        generators = _generators()
        if name in WRONGLY_SCORED:
            what = "the library's own score pays wrong answers in full"
            raise UserError(f"task reasoning-gym:{name}: {what}; take another generator")
        if name not in generators:
            nearest = difflib.get_close_matches(name, generators, n=1, cutoff=0.4)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(sorted(generators))}"
            raise UserError(f"task reasoning-gym:{name}: no such generator; {hint}")
        self.name = name

    def problems(
        self,
        num: int,
        seed: int,
        split: str,
        answer_in: str = "tag",
        template: str | None = None,
        solved_at: float = 1.0,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """answer_in   where the response has its answer: "tag", "boxed" or "whole"
        template    the prompt, with {question} in it; default: that of TEMPLATES
        solved_at   the least score of a solved problem
        options     the generator's"""
        place = f"task reasoning-gym:{self.name}"
        if answer_in not in TEMPLATES:
            raise UserError(f"{place}: answer_in is {answer_in!r}; it must be one of {', '.join(TEMPLATES)}")
        template = TEMPLATES[answer_in] if template is None else template
        if "{question}" not in template:
            raise UserError(f"{place}: template is {template!r}; it must contain {{question}}")
        entries = draw_entries(
            self.name, num, seed, check_split(f"reasoning-gym:{self.name}", split), options
        )
        return [
            {
                "problem_id": f"{self.name}-{digest(entry.question)}",
                "prompt": template.replace("{question}", entry.question),
                "question": entry.question,
                "answer": entry.answer,
                "answer_in": answer_in,
                "solved_at": solved_at,
                "made_by": entry.made_by,
            }
            for entry in entries
        ]

    def score(self, problem: dict[str, Any], response_text: str) -> dict[str, Any]:
        settings = _settings(problem["made_by"])
        entry = _make_entry(self.name, settings, problem["made_by"]["index"])
        if entry["question"] != problem["question"]:
            raise UserError(
                f"task reasoning-gym:{self.name}: problem {problem['problem_id']} was drawn otherwise; draw "
                "it again with this version of reasoning-gym, and score in worker processes or with "
                "PYTHONHASHSEED=0"
            )
        text = after_thinking(response_text, in_thought=bool(problem.get("in_thought")))
        answer = _extract(text, problem["answer_in"])
        reward = 0.0 if answer is None else _score(_make_dataset(self.name, settings), answer, entry)
        return {"reward": reward, "solved": reward >= problem["solved_at"]}


def draw_entries(name: str, num: int, seed: int, split: Split, options: Mapping[str, Any]) -> list[Drawn]:
    _check_options(name, options)
    function = f"{__name__}:_draw_here"
    drawn = draw_alike(f"task reasoning-gym:{name}", function, name, num, seed, split, options)
    return [Drawn(*one) for one in drawn]


def _draw_here(name: str, num: int, seed: int, split: Split, options: Mapping[str, Any]) -> list[Drawn]:
    share = 1 / TEST_ONE_IN if split == "test" else 1 - 1 / TEST_ONE_IN
    first = int(digest(f"{name}/{seed}"), 16) % 2**31  # entry i depends on seed + i: 0 and 1 would overlap
    found: dict[str, Drawn] = {}
    for factor in (2, 8, 32):
        size = factor * math.ceil(num / share) + 64
        source = {"options": options, "seed": first, "size": size}
        found.clear()
        for index in range(size):
            if len(found) == num:
                return list(found.values())
            entry = _make_entry(name, _settings(source), index)
            if split_of(entry["question"]) == split:
                found.setdefault(
                    entry["question"], Drawn(entry["question"], entry["answer"], {**source, "index": index})
                )
    what = f"gives only {len(found)} different {split} questions with options {options}"
    remedy = "ask for fewer (task.num_problems, evaluation.num_problems), or widen the options"
    raise UserError(f"task reasoning-gym:{name}: {what}; {remedy}")


def _generators() -> Mapping[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise UserError(
            f"task reasoning-gym: no module {error.name!r}; {how_to_install('reasoning-gym')}"
        ) from None
    return {name: kinds for name, kinds in DATASETS.items() if name != "composite"}


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    config = _generators()[name][1]
    known = [field.name for field in dataclasses.fields(config) if field.name not in NO_OPTIONS]
    for option in options:
        if option not in known:
            nearest = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {nearest[0]}? " if nearest else ""
            remedy = f"{hint}known are {', '.join([*known, *OWN_OPTIONS])}"
            raise UserError(f"task reasoning-gym:{name}: unknown option {option!r}; {remedy}")


def _settings(source: Mapping[str, Any]) -> str:
    return json.dumps({**source["options"], "seed": source["seed"], "size": source["size"]}, sort_keys=True)


@lru_cache(maxsize=8)
def _make_dataset(name: str, settings: str) -> Any:
    """Lists become tuples where the generator's configuration has tuples. Raises UserError for refused
    options."""
    dataset, config = _generators()[name]
    defaults, values = config(), json.loads(settings)
    for option, value in values.items():
        if isinstance(value, list) and isinstance(getattr(defaults, option), tuple):
            values[option] = tuple(value)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return dataset(config=config(**values))
    except (AssertionError, TypeError, ValueError) as error:
        options = {option: value for option, value in values.items() if option not in NO_OPTIONS}
        reason = " ".join(str(error).split())
        raise UserError(
            f"task reasoning-gym:{name}: refuses the options {options} ({reason}); correct them"
        ) from None


@lru_cache(maxsize=64)
def _make_entry(name: str, settings: str, index: int) -> dict[str, Any]:
    """Cached: a group's samples share an entry."""
    with contextlib.redirect_stdout(io.StringIO()):
        entry: dict[str, Any] = _make_dataset(name, settings)[index]
    return entry


def _extract(text: str, answer_in: str) -> str | None:
    if answer_in == "boxed":
        return find_answer(text, "boxed")
    if answer_in == "whole":
        return text.strip()
    before, closing, _ = text.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer.strip() if opening and closing else None


def _score(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    try:
        silence = io.StringIO()
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            score = float(dataset.score_answer(answer, entry))
    except Exception:  # several generators raise at answers that are not of the form they expect
        return 0.0
    return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0

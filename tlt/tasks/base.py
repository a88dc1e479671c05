"""Tasks. A task is the user's code: an error in it becomes one line that names task and place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from tlt.base.io.files import Record, get_id, has_lone_surrogate
from tlt.base.io.plugins import describe, get_object, split_name
from tlt.base.types import UserError

BUILTIN = {
    "countdown": "tlt.tasks.countdown:TASK",
    "data": "tlt.tasks.rows:DATA",
    "math": "tlt.tasks.math:TASK",
    "mixture": "tlt.tasks.mixture:TASK",
    "seeds": "tlt.tasks.rows:SEEDS",
}

TASK_FAMILIES = {
    "reasoning-gym": "tlt.tasks.reasoning_gym:ReasoningGym",
    "verifiers": "tlt.tasks.verifiers:Verifiers",
}
""""family:member" → the class that makes the member's task."""


@runtime_checkable
class Task(Protocol):
    """Prompts, and a reward for every response."""

    def problems(self, num: int, seed: int, **options: Any) -> list[dict[str, Any]]:
        """Returns `num` dicts that survive JSON, with a unique `problem_id`, a prompt and data for scoring.

        The prompt is `prompt` (text), `messages` (chat, for the tokenizer's template) or `prompt_ids` (token
        ids). Equal arguments give equal problems. The option `split` is always given: "train", or "test" for
        problems that training must not see. Other options: `task.options`.
        """
        ...

    def score(self, problem: dict[str, Any], response_text: str) -> dict[str, Any]:
        """Returns at least {"reward": float, "solved": bool}. The text is the response alone, without
        special tokens."""
        ...


@runtime_checkable
class PreparesRecords(Protocol):
    def prepare(self, record: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the problem of a row of `task.data`; None leaves the row out.

        record: columns as `task.columns` names them, JSON values, a `problem_id`.

        Equal rows give equal problems. A problem made here is returned unchanged, since `tlt task --out`
        writes such data.
        """
        ...


@runtime_checkable
class WarmsUp(Protocol):
    def warm_up(self, options: Mapping[str, Any]) -> None:
        """Runs once in every reward worker, before the first response and outside its time-out."""
        ...


def warm_up(task: Task, options: Mapping[str, Any]) -> None:
    if isinstance(task, WarmsUp):
        task.warm_up(options)


def get_task(name: str) -> Task:
    """name: ours, a family's such as "reasoning-gym:chain_sum", or the user's (`tlt.base.io.plugins`).
    Raises UserError."""
    family, colon, member = name.partition(":")
    if colon and family in TASK_FAMILIES:
        make_task: Callable[[str], Task] = get_object(f"task {name!r}", TASK_FAMILIES[family])
        return make_task(member)
    if name not in BUILTIN and not all(split_name(name)):
        known = sorted([*BUILTIN, *(f"{family}:NAME" for family in TASK_FAMILIES)])
        raise UserError(f"unknown task {name!r}: use one of {known} or your own as FILE.py:object")
    task: Task = get_object(f"task {name!r}", BUILTIN.get(name, name))
    with _blaming(f"task {name!r}: cannot be asked for its methods", "correct it"):  # by its __getattr__
        is_task, *_ = [isinstance(task, kind) for kind in (Task, PreparesRecords, WarmsUp)]
    if not is_task:
        raise UserError(
            f"task {name!r} is a {type(task).__name__} without problems() and score(): give a Task"
        )
    return task


def make_problems(name: str, num: int, seed: int, options: Mapping[str, Any]) -> list[Record]:
    """Raises UserError for unknown options and any error of the task."""
    task = get_task(name)
    if isinstance(task, type):
        raise UserError(f"task {name}: is a class; give an object of it, such as TASK = {task.__name__}()")
    try:
        parameters = inspect.signature(task.problems)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"task {name}: problems cannot be called ({describe(error)}); make it a method"
        ) from None
    try:
        parameters.bind(num, seed, **options)
    except TypeError as error:
        known = [parameter for parameter in parameters.parameters if parameter not in ("num", "seed")]
        raise UserError(f"task {name}: {_describe_refusal(known, options, error)}") from None
    with _blaming(f"task {name}: problems() failed", "correct it, or its options"):
        problems = task.problems(num, seed, **options)
    if not isinstance(problems, list):
        raise UserError(
            f"task {name}: problems() returned a {type(problems).__name__}; it must be a list of problems"
        )
    if not problems:
        raise UserError(
            f"task {name}: gave no problems for seed {seed} and options {dict(options)}; change them"
        )
    if len(problems) > num:
        raise UserError(f"task {name}: problems() returned {len(problems)}; it must give at most num, {num}")
    numbers: dict[str, int] = {}
    for number, problem in enumerate(problems, start=1):
        place = f"task {name}, problem {number}"
        if not isinstance(problem, dict):
            raise UserError(f"{place}: is a {type(problem).__name__}; it must be a dict")
        _refuse_half_characters(place, problem)
        problem_id = get_id(place, problem)
        if problem_id in numbers:
            raise UserError(
                f"{place}: problem_id {problem_id!r} is that of problem {numbers[problem_id]}; make it unique"
            )
        numbers[problem_id] = number
    return problems


def prepare_records(
    name: str, records: Sequence[tuple[str, Record]], options: Mapping[str, Any]
) -> list[tuple[str, Record]]:
    """Makes problems of the rows, by place. Of one id that the task gave, the first counts; of one id of the
    data, equal problems count once. Raises UserError."""
    task = get_task(name)
    if not isinstance(task, PreparesRecords):
        return [*records]
    prepared = [(place, row, _prepare(name, task, place, row, options)) for place, row in records]
    problems = [(place, row, problem) for place, row, problem in prepared if problem is not None]
    if records and not problems:
        remedy = "change task.options, or the data"
        raise UserError(f"{records[0][0]}: task {name}: leaves out this row and all others; {remedy}")
    return [*_once(problems)]


def _once(problems: Iterable[tuple[str, Record, Record]]) -> Iterator[tuple[str, Record]]:
    """problems: (place, row, problem)."""
    first: dict[str, Record] = {}
    for place, row, problem in problems:
        problem_id = problem.get("problem_id", place)
        earlier = first.setdefault(str(problem_id), problem)
        is_datas = problem_id == row.get("problem_id")
        if earlier is problem or (is_datas and earlier != problem):
            yield place, problem


def _prepare(
    name: str, task: PreparesRecords, place: str, row: Record, options: Mapping[str, Any]
) -> Record | None:
    with _blaming(f"{place}: task {name}: prepare() failed", "correct it, or the row"):
        try:
            problem = task.prepare(row, options)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
    if problem is None:
        return None
    if not isinstance(problem, dict):
        raise UserError(
            f"{place}: task {name}: prepare() returned a {type(problem).__name__}; it must be a dict"
        )
    _refuse_half_characters(f"{place}: task {name}", problem)
    return {"problem_id": row["problem_id"], **problem} if "problem_id" in row else problem


def _refuse_half_characters(place: str, problem: Record) -> None:
    for key, value in problem.items():
        if has_lone_surrogate([key, value]):
            raise UserError(f"{place}: {key!r} has half of a character, such as '\\ud83d'; leave it out")


@contextmanager
def _blaming(said: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserError(f"{said} ({describe(error)}); {remedy}") from None


def _describe_refusal(known: list[str], options: Mapping[str, Any], error: TypeError) -> str:
    is_unexpected = "unexpected keyword" in str(error)
    unknown = [option for option in options if option not in known] if is_unexpected else []
    if "split" in unknown:
        return (
            'problems() does not take split, which is "train" or "test"; write problems(self, num, seed, '
            "split, **options)"
        )
    if not unknown:
        return f"options {dict(options)}: {error}; known options are {', '.join(known)}"
    own = ", ".join(option for option in known if option != "split") or "none"
    return (
        f"problems() takes no option {', '.join(map(repr, unknown))}; known options are {own}:"
        " correct task.options, or remove them all with --task.options {}"
    )

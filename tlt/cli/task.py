"""`tlt task` and `tlt score`: a task's problems out, responses scored. A task is the user's code: its mistakes are one line."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

from tlt.cli.options import File, Options, PositiveInt, Seed
from tlt.config.mistakes import mistake, shorten
from tlt.files import Record, check_output_file, dumps, get_id, line_number, read_jsonl, write_jsonl
from tlt.types import UserError

if TYPE_CHECKING:
    from tlt.tasks.base import Task

TaskName = Annotated[Positional[str], arg(metavar="NAME")]


def _read_object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        value = json.loads(value)
    except json.JSONDecodeError as error:
        raise mistake(f"--options: {value!r} is no JSON ({error.msg}); write an object") from None
    if not isinstance(value, dict):
        raise mistake(f"--options: '{json.dumps(value)}' is no JSON object; write one such as '{{\"key\": 1}}'")
    return value


_SHOWN_AS_JSON = PrimitiveConstructorSpec[dict[str, Any]](
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda texts: dict(_read_object(texts[0])),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)


class WriteProblems(Options):
    """Write problems of a task."""

    name: TaskName
    """A task that comes with TLT, such as countdown, or your own as module:object."""
    num: PositiveInt
    """How many problems to write."""
    out: Annotated[Path, arg(metavar="FILE")]
    """JSONL to write, with one problem a line."""
    seed: Seed = 0
    """Seed of the problems: the same seed gives the same problems."""
    split: Literal["train", "test"] = "train"
    """Which problems: those to train on, or those held out; the two share none."""
    options: Annotated[dict[str, Any], BeforeValidator(_read_object), _SHOWN_AS_JSON] = Field(default_factory=dict)
    """The task's own options, as a JSON object."""


def write_problems(options: WriteProblems) -> Record:
    """Writes the problems; equal options give an equal file."""
    check_output_file(options.out, "--out")
    problems = make_problems(options.name, options.num, options.seed, {"split": options.split, **options.options})
    write_jsonl(options.out, problems)
    return {
        "task": options.name,
        "problems": len(problems),
        "seed": options.seed,
        "split": options.split,
        "out": str(options.out),
    }


def find_task(name: str) -> Task:
    """Returns the task called `name`. Raises UserError where it is unknown or its module cannot be imported."""
    from tlt.tasks.base import get_task

    try:
        return get_task(name)
    except ValueError as error:
        raise UserError(str(error)) from None
    except Exception as error:  # the module is the user's, and may raise anything
        raise UserError(f"task {name}: cannot be loaded ({type(error).__name__}: {error}); correct its module") from None


def make_problems(name: str, num: int, seed: int, options: Mapping[str, Any]) -> list[Record]:
    """Returns problems of the task `name`. Raises UserError for options that it does not know and for what it does wrong."""
    task = find_task(name)
    try:
        inspect.signature(task.problems).bind(num, seed, **options)
    except TypeError as error:
        known = [parameter for parameter in inspect.signature(task.problems).parameters if parameter not in ("num", "seed")]
        raise UserError(f"task {name}: options {dict(options)}: {error}; known options are {', '.join(known)}") from None
    try:
        problems: Any = task.problems(num, seed, **options)
        dumps(problems)
    except UserError:
        raise
    except Exception as error:  # the task is the user's, and may raise anything
        raise UserError(f"task {name}: problems() raised {type(error).__name__}: {error}; correct the task") from None
    if not isinstance(problems, list) or not all(isinstance(problem, dict) for problem in problems):
        raise UserError(f"task {name}: problems() gave {shorten(problems)}; it must return a list of dicts")
    if not problems:
        raise UserError(f"task {name}: gave no problems for seed {seed} and options {dict(options)}; change them")
    return problems


# --------------------------------------------------------------------------------------------------------------------
# score


class Score(Options):
    """Score responses: mean reward, solve rate, and each problem's."""

    name: TaskName
    """A task that comes with TLT, such as countdown, or your own as module:object."""
    problems: Annotated[Path, arg(metavar="FILE")]
    """JSONL of problems, as tlt task writes it. A problem without problem_id is named by its line."""
    responses: Annotated[Path, arg(metavar="FILE")]
    """JSONL of responses with problem_id and text, as tlt generate writes it."""
    out: File = None
    """JSONL to write: the responses again, with reward and solved."""


@dataclass(frozen=True)
class Verdict:
    """What the task says of one response."""

    reward: float
    is_solved: bool


@dataclass(frozen=True)
class ProblemScore:
    """The responses to one problem."""

    problem_id: str
    num_responses: int
    num_solved: int
    mean_reward: float

    def __str__(self) -> str:
        return f"solved {self.num_solved}/{self.num_responses}  mean reward {self.mean_reward:.3f}"


def score(options: Score) -> Record:
    """Scores every response, prints a line a problem and returns the summary."""
    if options.out is not None:
        check_output_file(options.out, "--out")
    task = find_task(options.name)
    problems = _read_problems(options.problems)
    verdicts: dict[str, list[Verdict]] = {problem_id: [] for problem_id in problems}
    scored: list[Record] = []
    for place, response in read_jsonl(options.responses, "--responses"):
        problem_id, text = get_id(place, response), response.get("text")
        if problem_id not in problems:
            raise UserError(f"{place}: problem_id {problem_id!r} is not in {options.problems}; give the problems answered")
        if not isinstance(text, str):
            raise UserError(f"{place}: text is {text!r}; it must be the response's text")
        where = f"{place}: task {options.name}"
        verdict = _score_one(task, problems[problem_id], text, f"{where}, problem {problem_id!r}")
        verdicts[problem_id].append(verdict)
        scored.append({**response, "reward": verdict.reward, "solved": verdict.is_solved})
    if options.out is not None:
        write_jsonl(options.out, scored)
    return _summarize(verdicts)


def _read_problems(path: Path) -> dict[str, Record]:
    problems: dict[str, Record] = {}
    for place, problem in read_jsonl(path, "--problems"):
        problem_id = get_id(place, problem, default=line_number(place))
        if problem_id in problems:
            raise UserError(f"{place}: problem_id {problem_id!r} is there twice; make it unique")
        problems[problem_id] = problem
    return problems


def _score_one(task: Task, problem: Record, text: str, where: str) -> Verdict:
    try:
        found: Any = task.score(problem, text)
    except KeyError as error:
        if error.args and error.args[0] not in problem:
            raise UserError(f"{where}: the problem has no {error}, which the task needs to score; add it") from None
        raise UserError(f"{where}: score() raised KeyError: {error}; correct the task") from None
    except Exception as error:  # the task is the user's, and may raise anything
        raise UserError(f"{where}: score() raised {type(error).__name__}: {error}; correct the task") from None
    try:
        verdict = Verdict(float(found["reward"]), bool(found["solved"]))
    except (TypeError, KeyError, ValueError, IndexError):
        verdict = Verdict(math.nan, False)
    if not math.isfinite(verdict.reward):
        remedy = 'it must be {"reward": a finite number, "solved": true or false}'
        raise UserError(f"{where}: score() gave {shorten(found)}; {remedy}")
    return verdict


def _summarize(verdicts: Mapping[str, Sequence[Verdict]]) -> Record:
    scores = [
        ProblemScore(
            problem_id,
            num_responses=len(found),
            num_solved=sum(verdict.is_solved for verdict in found),
            mean_reward=sum(verdict.reward for verdict in found) / len(found),
        )
        for problem_id, found in verdicts.items()
        if found
    ]
    width = max(len(problem.problem_id) for problem in scores)
    for problem in scores:
        print(f"{problem.problem_id:<{width}}  {problem}")
    num_responses = sum(problem.num_responses for problem in scores)
    mean_reward = sum(problem.mean_reward * problem.num_responses for problem in scores) / num_responses
    solve_rate = sum(problem.num_solved for problem in scores) / num_responses
    print(f"mean reward {mean_reward:.4f}, solve rate {solve_rate:.4f}")
    return {
        "problems": len(scores),
        "responses": num_responses,
        "mean_reward": mean_reward,
        "solve_rate": solve_rate,
        "problems_solved_at_least_once": sum(problem.num_solved > 0 for problem in scores) / len(scores),
        "problems_without_responses": len(verdicts) - len(scores),
    }

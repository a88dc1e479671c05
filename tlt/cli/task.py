"""`tlt task` and `tlt score`: a task's problems out, responses scored. A task is the user's code: its mistakes are one line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

from tlt.cli.options import File, Options, Seed
from tlt.config.mistakes import mistake
from tlt.config.section import PositiveInt
from tlt.files import Record, check_output_file, get_id, line_number, read_jsonl, write_jsonl
from tlt.types import Reward, UserError

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
    """Write a task's problems to a file."""

    name: TaskName
    """A task that comes with TLT, such as countdown, or your own as module:object."""
    num: PositiveInt
    """Number of problems to write."""
    out: Annotated[Path, arg(metavar="FILE")]
    """JSONL to write, with one problem a line."""
    seed: Seed = 0
    """Seed of the problems: the same seed gives the same problems."""
    split: Literal["train", "test"] = "train"
    """Problems to train on, or held-out ones; the two share none."""
    options: Annotated[dict[str, Any], BeforeValidator(_read_object), _SHOWN_AS_JSON] = Field(default_factory=dict)
    """The task's own options, as a JSON object."""


def write_problems(options: WriteProblems) -> Record:
    """Writes the problems; equal options give an equal file."""
    from tlt.tasks.base import make_problems

    check_output_file(options.out, "--out")
    problems = make_problems(options.name, options.num, options.seed, {"split": options.split, **options.options})
    try:
        write_jsonl(options.out, problems)
    except TypeError as error:
        raise UserError(f"task {options.name}: a problem cannot be written as JSON ({error}); correct the task") from None
    return {
        "task": options.name,
        "problems": len(problems),
        "seed": options.seed,
        "split": options.split,
        "out": str(options.out),
    }


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


def score(options: Score) -> Record:
    """Scores every response, prints a line a problem and returns the summary."""
    from tlt.rl import rewards
    from tlt.tasks.base import get_task

    if options.out is not None:
        check_output_file(options.out, "--out")
    task = get_task(options.name)
    problems = _read_problems(options.problems)
    scores: dict[str, list[Reward]] = {problem_id: [] for problem_id in problems}
    scored: list[Record] = []
    for place, response in read_jsonl(options.responses, "--responses"):
        problem_id, text = get_id(place, response), response.get("text")
        if problem_id not in problems:
            raise UserError(f"{place}: problem_id {problem_id!r} is not in {options.problems}; give the problems answered")
        if not isinstance(text, str):
            raise UserError(f"{place}: text is {text!r}; it must be the response's text")
        found = rewards.score(task, problems[problem_id], text)
        if found.error:
            where = f"{place}: task {options.name}, problem {problem_id!r}"
            raise UserError(f"{where}: score() failed ({found.error}); correct the task, or the problem")
        scores[problem_id].append(found)
        scored.append({**response, "reward": found.value, "solved": found.is_solved})
    if options.out is not None:
        write_jsonl(options.out, scored)
    return _summarize(scores)


def _read_problems(path: Path) -> dict[str, Record]:
    problems: dict[str, Record] = {}
    for place, problem in read_jsonl(path, "--problems"):
        problem_id = get_id(place, problem, default=line_number(place))
        if problem_id in problems:
            raise UserError(f"{place}: problem_id {problem_id!r} is there twice; make it unique")
        problems[problem_id] = problem
    return problems


def _summarize(by_problem: Mapping[str, Sequence[Reward]]) -> Record:
    from tlt.rl.rewards import summarize

    answered = {problem_id: found for problem_id, found in by_problem.items() if found}
    width = max(map(len, answered))
    for problem_id, found in answered.items():
        num_solved = sum(reward.is_solved for reward in found)
        print(f"{problem_id:<{width}}  solved {num_solved}/{len(found)}  mean reward {summarize(found).mean:.3f}")
    rewards = [reward for found in answered.values() for reward in found]
    overall = summarize(rewards)
    print(f"mean reward {overall.mean:.4f}, solve rate {overall.solve_rate:.4f}")
    return {
        "problems": len(answered),
        "responses": len(rewards),
        "mean_reward": overall.mean,
        "solve_rate": overall.solve_rate,
        "problems_solved_at_least_once": sum(any(r.is_solved for r in found) for found in answered.values()) / len(answered),
        "problems_without_responses": len(by_problem) - len(answered),
    }

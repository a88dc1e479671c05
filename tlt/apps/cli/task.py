"""`tlt task` and `tlt score`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field, model_validator

from tlt.apps.cli.data import Columns, Data, DataOptions, Subset
from tlt.apps.cli.options import File, JsonObject, Options, Written
from tlt.apps.cli.summary import Summary, log, percent, written
from tlt.base.config.mistakes import mistake
from tlt.base.config.rewards import check_weights
from tlt.base.config.section import split_words
from tlt.base.io.data import DataSource, read_data
from tlt.base.io.files import Record, check_output_file, get_id, read_jsonl, with_folder, write_jsonl
from tlt.base.types import Reward, Turns, UserError
from tlt.base.value_types import AnyFloat, Problems, Seed, shorten

if TYPE_CHECKING:
    from tlt.tasks.rewards.scoring import Completion, Scorer

TaskName = Annotated[str, Written("NAME", is_alone=True)]


class WriteProblems(Options):
    """Write a task's problems to a file: those that it makes itself, or those that it makes of data."""

    name: TaskName
    """A task that comes with TLT, such as countdown, or your own as module:object or FILE.py:object."""
    num: Problems
    """Number of problems to write; with --data, the first ones."""
    out: Annotated[Path, Written("FILE")]
    """JSONL to write, one problem a line."""
    data: Data = None
    """Rows to make the problems of: a JSONL or Parquet file, a folder of them, or a dataset of the Hugging
    Face hub."""
    subset: Subset = None
    """Configuration of the dataset of --data."""
    columns: Columns = Field(default_factory=dict)
    """Our names of columns → those of --data, such as '{"prompt": "question"}'."""
    seed: Seed = 0
    """Seed of the problems: the same seed gives the same problems."""
    split: Annotated[str | None, Written("NAME")] = None
    """Problems to train on (train, the default) or held-out ones (test); the two share none. With --data, any
    split of the dataset; default: its only one, else train."""
    options: JsonObject = Field(default_factory=dict)
    """The task's own options, as a JSON object."""

    @model_validator(mode="after")
    def _agree(self) -> WriteProblems:
        if self.data is None and self.split not in (None, "train", "test"):
            raise mistake(f"--split: is {self.split}; it must be train or test where there is no --data")
        return self


def write_problems(options: WriteProblems) -> Record:
    from tlt.tasks.base import make_problems, prepare_records

    check_output_file(options.out, "--out")
    if options.data is not None:
        source = DataSource(options.data, "--data", options.subset, options.split, options.columns)
        prepared = prepare_records(options.name, read_data(source), options.options)
        problems = [problem for _, problem in prepared[: options.num]]
    else:
        split = options.split or "train"
        problems = make_problems(options.name, options.num, options.seed, {"split": split, **options.options})
    try:
        write_jsonl(with_folder(options.out), problems)
    except TypeError as error:
        raise UserError(
            f"task {options.name}: a problem cannot be written as JSON ({error}); correct the task"
        ) from None
    return {
        "task": options.name,
        "problems": len(problems),
        "seed": options.seed,
        "split": options.split or "train",
        "out": str(options.out),
    }


def summarize_problems(record: Record) -> Summary:
    rows = {name: record[name] for name in ("split", "seed")}
    return Summary(f"{record['problems']:,} problems of {record['task']} written to {record['out']}", rows)


# ------------------------------------------------------------------------------------------------------------
# score


class Score(DataOptions):
    """Score responses: prints the mean reward and the solve rate; --out has each response's own.

    The reward is the task's own score, the weighted sum of reward functions, or of both, as in a run with
    [rewards]. Reward functions see the responses to a problem together, as one group.
    """

    name: TaskName = "data"
    """A task that comes with TLT, such as countdown, or your own as module:object or FILE.py:object; default:
    data, whose rows --functions alone score."""
    functions: Annotated[tuple[str, ...], BeforeValidator(split_words), Written("MODULE:FUNCTION,...")] = ()
    """Reward functions in TRL's signature, and task for the task's own score; default: the task's score
    alone."""
    weights: Annotated[tuple[AnyFloat, ...], BeforeValidator(split_words), Written("X,...")] = ()
    """Weights of the functions, whose weighted sum is the reward; default: 1 each."""
    solved_at: AnyFloat = 1.0
    """Reward from which on a response counts as solved, where task is not among the functions."""
    problems: Annotated[Path, Written("DATA")]
    """Problems: JSONL as tlt task writes it, or data as for its --data. A problem without problem_id is named
    by its line or row."""
    responses: Annotated[Path, Written("FILE")]
    """JSONL of responses with problem_id and text, as tlt generate writes it."""
    out: File = None
    """JSONL to write: the responses again, with reward and solved, and reward_parts by function. A response
    that no function could score has reward null, and reward_error."""

    @model_validator(mode="after")
    def _has_a_score(self) -> Score:
        check_weights(self.functions, self.weights, "--")
        return self


def score(options: Score) -> Record:
    from tlt.tasks.rewards.pool import check_scorable, describe_constant
    from tlt.tasks.rewards.scoring import RewardSpec, Scorer

    if options.out is not None:
        check_output_file(options.out, "--out")
    problems = _read_problems(options.name, options.source(options.problems, "--problems"))
    answers = [_answer(options, problems, *row) for row in read_jsonl(options.responses, "--responses")]
    has_own = any(answer.has_own_reward for answer in answers)
    if options.name == "data" and not options.functions and not has_own:
        raise UserError("--functions: rows of data have no score of their own; give it, or a task's NAME")
    weights = options.functions, options.weights, options.solved_at
    scorer = Scorer(RewardSpec(options.name, *weights, environment=has_own))
    for problem in [*problems.values()][:1]:
        scorer.check(problem)
    rewards = _score_groups(scorer, answers)
    scorer.close()
    scores: dict[str, list[Reward]] = {problem_id: [] for problem_id in problems}
    for answer, found in zip(answers, rewards, strict=True):
        if found.error and not options.functions:
            where = f"{answer.place}: task {options.name}, problem {answer.problem_id!r}"
            raise UserError(f"{where}: score() failed ({found.error}); correct the task, or the problem")
        scores[answer.problem_id].append(found)
    check_scorable(rewards, options.name, str(options.responses))
    for line in describe_constant(rewards, str(options.responses)):
        log(line)
    if options.out is not None:
        pairs = zip(answers, rewards, strict=True)
        write_jsonl(with_folder(options.out), [{**answer.row, **_score_of(found)} for answer, found in pairs])
    return _summarize(scores)


@dataclass(frozen=True)
class _Answer:
    place: str
    problem_id: str
    row: Record
    completion: Completion

    @property
    def has_own_reward(self) -> bool:
        turns = self.completion.turns
        return turns is not None and turns.reward is not None

    @property
    def group(self) -> tuple[str, str, str]:
        """What is scored together. Responses kept by a run may be of several steps."""
        return self.problem_id, str(self.row.get("purpose")), str(self.row.get("policy_version"))


def _answer(options: Score, problems: Mapping[str, Record], place: str, row: Record) -> _Answer:
    from tlt.tasks.rewards.scoring import Completion

    problem_id, text = get_id(place, row), row.get("text")
    if problem_id not in problems:
        raise UserError(
            f"{place}: problem_id {problem_id!r} is not in {options.problems}; give the problems answered"
        )
    if not isinstance(text, str):
        raise UserError(f"{place}: text is {text!r}; it must be the response's text")
    thought = {"in_thought": True} if row.get("in_thought") is True else {}
    token_ids, turns = tuple(row.get("token_ids") or ()), _turns(place, row)
    if turns is not None:
        text, token_ids = row["turns"]["last_turn"], token_ids[turns.num_settled :]
    completion = Completion(problems[problem_id] | thought, text, token_ids, turns=turns)
    return _Answer(place, problem_id, row, completion)


def _turns(place: str, row: Record) -> Turns | None:
    given = row.get("turns")
    try:
        if given is not None and not isinstance(given["last_turn"], str):
            raise TypeError
        return Turns.read(given)
    except (TypeError, ValueError, KeyError):
        raise UserError(
            f"{place}: turns is {shorten(given)}; it must be as tlt generate --environment writes it"
        ) from None


def _score_groups(scorer: Scorer, answers: Sequence[_Answer]) -> list[Reward]:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for number, answer in enumerate(answers):
        groups.setdefault(answer.group, []).append(number)
    rewards: dict[int, Reward] = {}
    for numbers in groups.values():
        found = scorer.score([answers[number].completion for number in numbers])
        rewards.update(zip(numbers, found, strict=True))
    return [rewards[number] for number in range(len(answers))]


def _score_of(found: Reward) -> Record:
    line: Record = {"reward": found.value if found.is_scored else None, "solved": found.is_solved}
    if found.parts:
        line["reward_parts"] = dict(found.parts)
    return line if found.is_scored else {**line, "reward_error": found.error}


def _read_problems(task: str, source: DataSource) -> dict[str, Record]:
    from tlt.tasks.base import prepare_records

    problems: dict[str, Record] = {}
    for place, problem in prepare_records(task, read_data(source), {}):
        problem_id = get_id(place, problem)
        if problem_id in problems:
            raise UserError(f"{place}: problem_id {problem_id!r} is there twice; make it unique")
        problems[problem_id] = problem
    return problems


def _summarize(by_problem: Mapping[str, Sequence[Reward]]) -> Record:
    from tlt.tasks.rewards.pool import summarize

    answered = {problem_id: found for problem_id, found in by_problem.items() if found}
    rewards = [reward for found in answered.values() for reward in found]
    overall = summarize(rewards)
    if overall.num_errors:
        told = f"{overall.num_errors} of {len(rewards)} responses could not be scored"
        print(f"{told}; the first: {overall.first_error}")
    parts = {"reward_parts": overall.parts, "unscored": overall.num_errors} if overall.parts else {}
    return {
        "problems": len(answered),
        "responses": len(rewards),
        "mean_reward": overall.mean,
        "solve_rate": overall.solve_rate,
        **parts,
        "problems_solved_at_least_once": sum(any(r.is_solved for r in found) for found in answered.values())
        / len(answered),
        "problems_without_responses": len(by_problem) - len(answered),
    }


def summarize_scores(record: Record) -> Summary:
    mean, solved = (written(name, record[name]) for name in ("mean_reward", "solve_rate"))
    counts = f"{record['responses']:,} responses to {record['problems']:,} problems"
    rows: Record = {name: record[name] for name in ("reward_parts", "unscored") if name in record}
    rows["problems solved at least once"] = percent(record["problems_solved_at_least_once"])
    rows["problems_without_responses"] = record["problems_without_responses"]
    return Summary(f"mean reward {mean}, {solved} solved: {counts}", rows)

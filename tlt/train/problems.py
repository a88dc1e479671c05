"""A run's problems: made by its task or read from a file, as tokens; and which of them each step takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tlt.config.schema import Config
from tlt.files import Record, get_id, read_jsonl
from tlt.models.hf_config import load_model_config
from tlt.models.tokenizer import check_prompt, load_tokenizer
from tlt.tasks.base import get_task
from tlt.types import Problem, UserError


def load_problems(config: Config, split: str) -> list[Problem]:
    """The task's problems of a split, as tokens; each is checked against the model's window."""
    tokenizer = load_tokenizer(config.model.path)
    window = load_model_config(config.model.path).max_positions
    records = _problem_records(config, split)
    problems = []
    for record in records:
        where = f"task {config.task.name}, problem {record['problem_id']!r}"
        prompt_ids = tokenizer.encode_text(record["prompt"], where)
        check_prompt(prompt_ids, where, vocab_size=tokenizer.vocab_size, window=window)
        problems.append(Problem(record["problem_id"], prompt_ids, record))
    return problems


def _problem_records(config: Config, split: str) -> list[dict[str, Any]]:
    file = config.task.problems_file
    if split == "train" and file is not None:
        return [_checked_problem(place, record) for place, record in read_jsonl(file, "task.problems_file")]
    num = config.task.num_problems if split == "train" else config.evaluation.num_problems
    assert num is not None
    try:
        return get_task(config.task.name).problems(num, config.run.seed, split=split, **config.task.options)
    except (ValueError, TypeError) as error:
        raise UserError(f"task {config.task.name}: {error}; correct [task] in the configuration") from None


def _checked_problem(place: str, record: Record) -> Record:
    get_id(place, record)
    if not isinstance(record.get("prompt"), str):
        raise UserError(f"{place}: prompt is {record.get('prompt')!r}; it must be text, as tlt task writes it")
    return record


def problems_of_step(problems: Sequence[Problem], step: int, num: int, seed: int) -> list[Problem]:
    """Step `step`'s share of an endless sequence of epochs, each shuffled by (seed, epoch). What does not fill a step at
    the end of an epoch waits for the next."""
    steps_per_epoch = len(problems) // num
    epoch, position = divmod(step, steps_per_epoch)
    order = list(range(len(problems)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return [problems[i] for i in order[position * num : (position + 1) * num]]

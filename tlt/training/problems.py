"""A run's problems: made by its task or read from a file, as tokens; and which of them each step takes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tlt.config.schema import Config
from tlt.files import Record, read_jsonl
from tlt.models.hf_config import load_model_config
from tlt.models.prompts import encode_prompts
from tlt.models.tokenizer import load_tokenizer
from tlt.tasks.base import make_problems
from tlt.types import Problem, UserError


def load_problems(config: Config, split: str) -> list[Problem]:
    """Returns the task's problems of a split, "train" or "test". Raises UserError for one that the model cannot read, and where
    there are fewer than a step takes."""
    tokenizer = load_tokenizer(config.model.path)
    window = load_model_config(config.model.path).max_positions
    records = _records(config, split)
    prompts = encode_prompts(records, tokenizer, vocab_size=tokenizer.vocab_size, window=window)
    per_step = config.rollout.problems_per_step
    if split == "train" and len(prompts) < per_step:
        source = config.task.problems_file or f"task {config.task.name}"
        raise UserError(
            f"{source}: gives {len(prompts)} problems, fewer than a step takes;"
            f" give more, or lower rollout.problems_per_step, which is {per_step}"
        )
    return [
        Problem(prompt.problem_id, prompt.prompt_ids, {"problem_id": prompt.problem_id, **record})
        for prompt, (_, record) in zip(prompts, records, strict=True)
    ]


def _records(config: Config, split: str) -> list[tuple[str, Record]]:
    """Returns (place, record) pairs."""
    task, file = config.task, config.task.problems_file
    if split == "train" and file is not None:
        return read_jsonl(file, "task.problems_file")
    num = task.num_problems if split == "train" else config.evaluation.num_problems
    assert num is not None, "there is a number where there is no file"
    problems = make_problems(task.name, num, config.run.seed, {"split": split, **task.options})
    return [(f"task {task.name}, problem {number}", problem) for number, problem in enumerate(problems, start=1)]


def problems_of_step(problems: Sequence[Problem], step: int, num: int, seed: int) -> list[Problem]:
    """Returns step `step`'s share of an endless sequence of epochs, each shuffled by (seed, epoch). What does not fill a step
    at the end of an epoch waits for the next."""
    steps_per_epoch = len(problems) // num
    epoch, position = divmod(step, steps_per_epoch)
    order = list(range(len(problems)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return [problems[i] for i in order[position * num : (position + 1) * num]]


def spare_problems(problems: Sequence[Problem], step: int, num: int, seed: int) -> list[Problem]:
    """Returns the problems that step `step` does not begin with, shuffled by (seed, step): what it may take in their place."""
    taken = {problem.problem_id for problem in problems_of_step(problems, step, num, seed)}
    spare = [problem for problem in problems if problem.problem_id not in taken]
    random.Random(f"{seed}/spare/{step}").shuffle(spare)
    return spare

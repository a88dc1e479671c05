"""A run's problems, made by its task or read from data, and their order over the steps."""

from __future__ import annotations

import datetime
import functools
import json
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt.base.config.schema import Config
from tlt.base.io.data import DataSource, Records, read_data
from tlt.base.io.files import Record
from tlt.base.types import Problem, UserError
from tlt.engine.build.model import model_folder
from tlt.models.hf.families import load_model_config
from tlt.models.hf.prompts import ChatFormat, EncodedPrompt, describe_prompts, encode_prompts
from tlt.models.hf.tokenizer import Tokenizer, load_tokenizer
from tlt.tasks.base import make_problems, prepare_records
from tlt.training.build.environment import check_rewards, check_turns, with_environment
from tlt.training.ranks.world import World, broadcast_json, refuse_together
from tlt.training.saved.encoded import NAMES, Encoded, key_of, read_encoded
from tlt.training.saved.inputs import digest_of_problems


@dataclass(frozen=True)
class ReadProblems:
    """encoded: token ids of all rows, omitted ones too.
    notes: for the user, about rows that are omitted or look unintended.
    """

    problems: list[Problem]
    encoded: Encoded
    notes: tuple[str, ...]


def load_problems(config: Config, split: str, folder: Path | None = None) -> list[Problem]:
    folder = folder or model_folder(config)
    return read_problems(
        config, split, load_tokenizer(folder), load_model_config(folder).max_positions
    ).problems


def read_problems(config: Config, split: str, tokenizer: Tokenizer, window: int) -> ReadProblems:
    """UserError for a prompt that the model cannot read, and for fewer problems than a step takes."""
    given, chat = _records(config, split), chat_format(config)
    records = with_environment(config.environment, given)
    check_turns(config.environment, given, tokenizer, chat)
    check_rewards(config, given)
    longest, vocab_size = config.task.max_prompt_tokens, tokenizer.vocab_size
    key = key_of(records, chat, longest, tokenizer.path)
    stored = read_encoded(config.run.out_dir / NAMES[split], key)
    prompts = encode_prompts(
        records,
        tokenizer,
        chat,
        vocab_size=vocab_size,
        window=window,
        longest=longest,
        known=None if stored is None else stored.rows,
    )
    encoded = stored
    if encoded is None:
        ids_of = {id(prompt.record): prompt.prompt_ids for prompt in prompts}
        encoded = Encoded(key, [ids_of.get(id(record), ()) for _, record in records])
    rows = [record for _, record in records]
    told = [*describe_prompts(rows, len(prompts), longest, "task.max_prompt_tokens")]
    per_step = config.rollout.problems_per_step
    if split == "train" and len(prompts) < per_step:
        source = data_source(config, split) or f"task {config.task.name}"
        raise UserError(
            f"{source}: gives {len(prompts)} problems, fewer than a step takes"
            f"{f' ({told[0]})' if len(prompts) < len(records) else ''};"
            f" give more, or lower rollout.problems_per_step, which is {per_step}"
        )
    # scorers and environments get the row as given, without the tools that its prompt shows
    row_of = {id(record): row for (_, record), (_, row) in zip(records, given, strict=True)}
    problems = [
        Problem(prompt.problem_id, prompt.prompt_ids, _data(prompt, row_of[id(prompt.record)], tokenizer))
        for prompt in prompts
    ]
    where = "" if split == "train" else "evaluation: "
    return ReadProblems(problems, encoded, tuple(where + line for line in told))


def _data(prompt: EncodedPrompt, row: Record, tokenizer: Tokenizer) -> Record:
    """in_thought: the prompt has opened a thought; a response that does not close it gives no answer."""
    in_thought = {"in_thought": True} if tokenizer.is_in_thought(prompt.prompt_ids) else {}
    return {"problem_id": prompt.problem_id, **row, **in_thought}


def chat_format(config: Config) -> ChatFormat:
    task = config.task
    day = None if task.date is None else datetime.date.fromisoformat(task.date)
    return ChatFormat(
        task.chat or config.environment.is_used, task.system_prompt, config.model.chat_template_kwargs, day
    )


def describe_overlap(
    train: Sequence[Problem], held_out: Sequence[Problem], by_row: bool = False
) -> str | None:
    """None: no overlap. No error, since large data sets repeat rows.

    by_row: environments begin by a problem's row, so prompts may repeat.
    """
    what_is_asked: Callable[[Problem], Hashable] = _row_of if by_row else lambda problem: problem.prompt_ids
    trained = {what_is_asked(problem): problem.problem_id for problem in train}
    shared = [problem for problem in held_out if what_is_asked(problem) in trained]
    if not shared:
        return None
    example, number = shared[0], f"{len(shared):,} of {len(held_out):,} held-out problems"
    pair = f"{example.problem_id!r} is training problem {trained[what_is_asked(example)]!r}"
    remedy = "leave them out of task.data, or evaluate on others"
    return f"evaluation: {number} are trained on, too ({pair}): {remedy}"


def _row_of(problem: Problem) -> Hashable:
    columns = {
        name: value for name, value in problem.data.items() if name not in ("problem_id", "in_thought")
    }
    return problem.prompt_ids, json.dumps(columns, sort_keys=True) if columns else problem.problem_id


def check_same_problems(world: World, *splits: Sequence[Problem]) -> None:
    """UserError on all ranks if machines hold different files under one name."""
    digests = [digest_of_problems(problems) for problems in splits]
    mistake = "task.data: these are other problems than on rank 0; give all machines the same files"
    refuse_together(world, None if broadcast_json(world, digests) == digests else mistake)


def data_source(config: Config, split: str) -> DataSource | None:
    task, held_out = config.task, config.evaluation
    if split == "train":
        if task.data is None:
            return None
        return DataSource(task.data, "task.data", task.subset, task.split, task.columns)
    columns = task.columns if held_out.columns is None else held_out.columns
    if held_out.data is not None:
        return DataSource(
            held_out.data, "evaluation.data", held_out.subset, held_out.split, columns, usual_split="test"
        )
    if task.data is not None and held_out.split is not None:
        return DataSource(task.data, "task.data", held_out.subset or task.subset, held_out.split, columns)
    return None


def _records(config: Config, split: str) -> Records:
    task, source = config.task, data_source(config, split)
    num = task.num_problems if split == "train" else config.evaluation.num_problems
    if source is not None:
        return prepare_records(task.name, read_data(source), task.options)[:num]
    assert num is not None, "the schema wants a number where there is no data"
    problems = make_problems(task.name, num, config.run.seed, {"split": split, **task.options})
    return [(f"task {task.name}, problem {n}", problem) for n, problem in enumerate(problems, start=1)]


def problems_of_step(problems: Sequence[Problem], step: int, num: int, seed: int) -> list[Problem]:
    """From endless epochs, each shuffled by (seed, epoch); an incomplete last step is skipped."""
    steps_per_epoch = len(problems) // num
    epoch, position = divmod(step, steps_per_epoch)
    return [problems[i] for i in _order(len(problems), seed, epoch)[position * num : (position + 1) * num]]


@functools.lru_cache(maxsize=2)
def _order(num: int, seed: int, epoch: int) -> list[int]:
    """Callers must not change it."""
    order = list(range(num))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def spare_problems(problems: Sequence[Problem], step: int, num: int, seed: int) -> list[Problem]:
    """Replacements for dynamic sampling, shuffled by (seed, step)."""
    taken = {problem.problem_id for problem in problems_of_step(problems, step, num, seed)}
    spare = [problem for problem in problems if problem.problem_id not in taken]
    random.Random(f"{seed}/spare/{step}").shuffle(spare)
    return spare

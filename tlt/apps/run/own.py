"""A run of a model and data, or a task, without a configuration.

--model.path M --task.data D … ─▶ Facts ─ apps/plan/choices.py ─▶ OwnRun: sections, choices, a few rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tlt.apps.plan.choices import Choices, DataFacts, MachineFacts, ModelFacts, RunFacts, choose, choose_data
from tlt.base.config.load import load_config, read_overrides
from tlt.base.config.schema import Config
from tlt.base.io.data import DataSource, list_splits, names_rows, read_data
from tlt.base.io.files import Record
from tlt.base.io.hub import resolve_description
from tlt.base.types import UserError
from tlt.engine.memory import machine_bytes
from tlt.models.hf.families import load_model_config
from tlt.models.hf.files import read_json
from tlt.models.hf.tokenizer import load_tokenizer
from tlt.tasks.base import make_problems
from tlt.training.build.problems import load_problems
from tlt.training.build.ranks import num_cores

REWARD = "reward:reward"
"""Written by `tlt init own`."""
_ROWS = 100
_EXAMPLES = 5


@dataclass(frozen=True)
class OwnRun:
    """rows: some, with TLT's column names."""

    config: Config
    choices: Choices
    given: Mapping[str, Any]
    rows: Sequence[Record]


def choose_own(overrides: Sequence[str], writes_reward: bool = False) -> OwnRun:
    """Raises UserError where nothing scores the responses.

    writes_reward: whether the caller writes the function `REWARD` where nothing else scores.
    """
    given = {".".join(override.keys): override.value for override in read_overrides(overrides)}
    folder = resolve_description(Path(given["model.path"]), with_tokenizer=True)
    model, source = _look_at_model(folder), _source(given)
    data = _look_at_task(load_config({}, overrides)) if source is None else _look_at_data(source)
    about_data = choose_data(model, data, given)
    sections = _sections(about_data)
    if about_data.reward != "task":
        if not writes_reward:
            what = "no column of the data says by a number or formula what is right"
            remedy = "give --rewards.functions module:function, or have tlt init own write one to fill in"
            raise UserError(f"rewards.functions: {what}; {remedy}")
        sections["rewards"] = {"functions": [REWARD]}
    problems = load_problems(load_config(sections, overrides), "train", folder)
    longest = max(len(problem.prompt_ids) for problem in problems)
    choices = choose(RunFacts(model, data, _look_at_machine(given), longest, len(problems)), given)
    sections = _sections(choices) | {name: sections[name] for name in ("rewards",) if name in sections}
    config = load_config(sections, overrides)
    rows = data.rows
    if source is not None:
        rows = [record for _, record in read_data(replace(source, columns=config.task.columns))]
    return OwnRun(config, choices, given, rows[:_EXAMPLES])


def _source(given: Mapping[str, Any]) -> DataSource | None:
    if given.get("task.data") is None:
        return None
    return DataSource(
        Path(given["task.data"]), "task.data", given.get("task.subset"), given.get("task.split")
    )


def _sections(choices: Choices) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for choice in choices.chosen:
        section, key = choice.key.split(".")
        sections.setdefault(section, {})[key] = choice.value
    return sections


def _look_at_model(folder: Path) -> ModelFacts:
    written, tokenizer = read_json(folder / "config.json"), load_tokenizer(folder)
    stored_as = written.get("dtype") or written.get("torch_dtype") or "float32"
    return ModelFacts(load_model_config(folder), tokenizer.has_template, str(stored_as))


def _look_at_task(config: Config) -> DataFacts:
    options = {"split": "train", **config.task.options}
    rows = make_problems(config.task.name, _ROWS, config.run.seed, options)
    return DataFacts(rows, len(rows), is_made=True)


def _look_at_data(source: DataSource) -> DataFacts:
    rows, splits = [record for _, record in read_data(source)], list_splits(source)
    train = splits[0] if len(splits) == 1 else "train"
    test = next((name for name in ("test", "validation", "dev") if name in splits and name != train), None)
    can_verify = find_spec("math_verify") is not None
    return DataFacts(rows[:_ROWS], len(rows), test, train if names_rows(source) else None, can_verify)


def _look_at_machine(given: Mapping[str, Any]) -> MachineFacts:
    num_gpus = 0 if given.get("run.device") == "cpu" else torch.cuda.device_count()
    num_bytes = torch.cuda.get_device_properties(0).total_memory if num_gpus else machine_bytes()
    return MachineFacts(num_gpus, num_cores(), num_bytes)

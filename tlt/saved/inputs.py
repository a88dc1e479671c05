"""What a run computes from, to which a run that goes on is held: configuration, problems, base model, reward
code.

    begins     Inputs ─▶ manifest of every checkpoint, header of every journal
    goes on    Inputs ◀─ compared ─▶ what they were: the same, or one line that says what is not

Reward code may change, for people mend it; that is said. A key that says how long and on what a run runs
may change, too. Of data and model there are digests alone: these say that something is another, not what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tlt.config.schema import Config
from tlt.io.plugins import source_of
from tlt.types import Problem, UserError

Values = Mapping[str, Mapping[str, Any]]
"""Values of a configuration, by section and key."""

MAY_CHANGE_ON_RESUME = {
    "run": {
        "out_dir",
        "num_steps",
        "num_ranks",
        "threads_per_rank",
        "device",
        "checkpoint_every",
        "keep_checkpoints",
    }
    | {"journal", "time_limit_minutes", "launcher", "max_restarts", "timeout_seconds", "keep_responses"},
    "rollout": {"replay"},
    "parallel": {"policy", "checkpoint_activations", "reduce_each_micro_batch"},
}
"""Keys, by section, that say how long and on what a run runs, not what it computes."""
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files of a base model, beside its weights, on which tokens and their probabilities depend."""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NAMES = {"train": "training problems", "test": "held-out problems"}


@dataclass(frozen=True)
class Inputs:
    """config: the resolved configuration, as JSON has it.
    problems: by split, digest of the problems with all that they are scored by.
    model: by name, digests of the base model's files beside its weights.
    weights: identifies those with which the policy began, as the KL's reference does; empty: nobody has
        looked.
    code: by module, digest of the user's tasks and reward functions."""

    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    model: dict[str, str] = field(default_factory=dict)
    weights: str = ""
    code: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        config: Config,
        problems: Mapping[str, Sequence[Problem]],
        model: Path,
        weights: str = "",
        adapter: Path | None = None,
    ) -> Inputs:
        """Returns the inputs of a run. problems: by split.
        model, adapter: folders of what the policy starts from."""
        digests = {split: digest_of_problems(some) for split, some in problems.items()}
        paths = [
            *map(model.joinpath, _MODEL_FILES),
            *(map(adapter.joinpath, _ADAPTER_FILES) if adapter else ()),
        ]
        files = {path.name: _digest(path) for path in paths if path.is_file()}
        code = {module: _digest(path) for module, path in code_of(config).items()}
        return Inputs(config.model_dump(mode="json"), digests, files, weights, code)

    def refuse_other(self, was: Inputs, config: Config, when: str) -> None:
        """Raises UserError where a run had others. config: that of these.  when: it had them."""
        remedy = "or begin a new run in another --run.out_dir"
        if (change := find_change(was.config, config)) is not None:
            key, old, new = change
            raise UserError(
                f"--resume: {key} is {new!r}, and was {old!r} {when}; set it back in config.json, {remedy}"
            )
        for split, digest in was.problems.items():
            if self.problems.get(split, digest) != digest:
                raise UserError(
                    f"--resume: the {_NAMES[split]} are not those of the run {when}; bring back the data or "
                    "the task that they"
                    f" come from, {remedy}"
                )
        names = (*_MODEL_FILES, *_ADAPTER_FILES)
        files = [name for name in names if was.model and self.model.get(name) != was.model.get(name)]
        if self.weights and was.weights and self.weights != was.weights:
            files.append("weights")
        if files:
            raise UserError(
                f"--resume: model.path: {config.model.path} has other {files[0]} than the base model "
                f"{when}; bring that back,"
                f" {remedy}"
            )

    def changed_code(self, was: Inputs) -> list[str]:
        """Returns the user's modules that are not as they were."""
        return [module for module, digest in was.code.items() if self.code.get(module, digest) != digest]


NO_INPUTS: Final = Inputs()
"""Of which nothing is known: any others pass for them."""


def find_change(was: Values, config: Config) -> tuple[str, Any, Any] | None:
    """Returns the first key (section.key, old, new) that a resumed run may not change, and that is
    changed. A key that only one of two versions of TLT knows does not count."""
    for section, values in config.model_dump(mode="json").items():
        for key, value in values.items():
            before = was.get(section, {})
            if key in before and before[key] != value and not _may_change(section, key, config):
                return f"{section}.{key}", before[key], value
    return None


def _may_change(section: str, key: str, config: Config) -> bool:
    if (section, key) == ("run", "num_steps"):
        return not config.optimizer.depends_on_num_steps
    return section == "tracking" or key in MAY_CHANGE_ON_RESUME.get(section, ())


def digest_of_problems(problems: Sequence[Problem]) -> str:
    """Returns what identifies problems, in their order, with all that they are scored by. A value that
    JSON does not have counts by its type alone."""
    digest = hashlib.sha256()
    for problem in problems:
        record = sorted(problem.data.items(), key=lambda item: str(item[0]))
        facts = [problem.problem_id, problem.prompt_ids, record]
        digest.update(
            json.dumps(facts, skipkeys=True, default=lambda value: type(value).__name__).encode() + b"\n"
        )
    return digest.hexdigest()


def code_of(config: Config) -> dict[str, Path]:
    """Returns module → file of the user's own tasks and reward functions, as far as they are files."""
    found = {name.partition(":")[0]: source_of(name) for name in _names_of(config)}
    return {module: path for module, path in found.items() if path is not None}


def _names_of(config: Config) -> Iterator[str]:
    """Yields the names of all tasks and reward functions, those of a mixture's parts too."""
    yield config.task.name
    yield from config.rewards.functions
    for part in config.task.options.get("tasks", ()):
        if isinstance(part, Mapping) and isinstance(name := part.get("name"), str):
            yield name


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

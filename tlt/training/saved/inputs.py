"""The inputs of a run, to which a resumed run is held: configuration, problems, base model, reward code.

    new run        Inputs ─▶ manifest of every checkpoint, header of every journal
    resumed run    Inputs ◀─ compared ─▶ the earlier ones: the same, or one line that says what differs

Reward code may change; the user is told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tlt.base.config.schema import Config
from tlt.base.io.plugins import file_in, source_of, split_name
from tlt.base.types import Problem, SamplingParams, UserError
from tlt.base.value_types import shorten

if TYPE_CHECKING:
    from tlt.models.hf.tokenizer import Tokenizer  # which takes a second

Values = Mapping[str, Mapping[str, Any]]
"""Section → key → value."""

MAY_CHANGE_ON_RESUME = {
    "run": {
        "out_dir",
        "num_steps",
        "num_ranks",
        "threads_per_rank",
        "device",
        "checkpoint_every",
        "keep_checkpoints",
        "time_limit_minutes",
        "launcher",
        "max_restarts",
        "timeout_seconds",
        "keep_responses",
        "show_samples",
    },
    "parallel": {"policy", "checkpoint_activations", "reduce_each_micro_batch"},
    "rewards": {"num_workers", "timeout_seconds"},
    "environment": {"num_workers"},
}
"""These say how long and on what a run runs, not what it computes."""
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Besides weights, these determine tokens and their probabilities."""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NAMES = {"train": "training problems", "test": "held-out problems"}


@dataclass(frozen=True)
class Inputs:
    """As digests. By default they are unknown, and agree with any."""

    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Split → digest of problems and the data they are scored by."""
    model: dict[str, str] = field(default_factory=dict)
    """File → digest, weights apart."""
    weights: str = ""
    """Digest of the first policy, which is also the KL's reference."""
    code: dict[str, str] = field(default_factory=dict)
    """Module of the user's → digest."""
    rows: dict[str, str] = field(default_factory=dict)
    """Split → digest of the problems without their prompts: the data may be as it was where the tokenizer is
    not."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """From the tokenizer's files: `special_tokens_of`."""

    @staticmethod
    def of(
        config: Config,
        problems: Mapping[str, Sequence[Problem]],
        model: Path,
        weights: str = "",
        adapter: Path | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> Inputs:
        """problems: by split.
        adapter: folder that the policy starts from.
        """
        paths = [model / name for name in _MODEL_FILES]
        if adapter is not None:
            paths += [adapter / name for name in _ADAPTER_FILES]
        return Inputs(
            config.model_dump(mode="json"),
            {split: digest_of_problems(some) for split, some in problems.items()},
            {path.name: _digest(path) for path in paths if path.is_file()},
            weights,
            {module: _digest(path) for module, path in code_of(config).items()},
            {split: digest_of_problems(some, with_prompts=False) for split, some in problems.items()},
            {**(special_tokens or {})},
        )

    def refuse_other(self, was: Inputs, config: Config, when: str) -> None:
        """Raises UserError. when: the run had its earlier inputs."""
        remedy = "or begin a new run in another --run.out_dir"
        if (change := find_change(was.config, config)) is not None:
            key, old, new = change
            raise UserError(
                f"--resume: {key} is {new!r}, and was {old!r} {when}; set it back in config.json, {remedy}"
            )
        for split, digest in was.problems.items():
            if self.problems.get(split, digest) == digest:
                continue
            if self.rows.get(split) == was.rows.get(split, ""):
                raise UserError(
                    f"--resume: the prompts of the {_NAMES[split]} have other tokens than {when}, for the "
                    f"chat template or the tokenizer of {config.model.path} has changed; bring that back, "
                    f"{remedy}"
                )
            raise UserError(
                f"--resume: the {_NAMES[split]} are not those of the run {when}; bring back the data or "
                f"the task that they come from, {remedy}"
            )
        for name in self.special_tokens.keys() & was.special_tokens.keys():
            if (now := self.special_tokens[name]) != (before := was.special_tokens[name]):
                raise UserError(
                    f"--resume: model.path: the {name} of {config.model.path} are {shorten(now)}, and were "
                    f"{shorten(before)} {when}; bring the tokenizer's files back, {remedy}"
                )
        names = (*_MODEL_FILES, *_ADAPTER_FILES)
        files = [name for name in names if was.model and self.model.get(name) != was.model.get(name)]
        if self.weights and was.weights and self.weights != was.weights:
            files.append("weights")
        if files:
            raise UserError(
                f"--resume: model.path: {config.model.path} has other {files[0]} than the base model "
                f"{when}; bring that back, {remedy}"
            )

    def changed_code(self, was: Inputs) -> list[str]:
        return [module for module, digest in was.code.items() if self.code.get(module, digest) != digest]


NO_INPUTS: Final = Inputs()


def find_change(was: Values, config: Config) -> tuple[str, Any, Any] | None:
    """(section.key, old, new) of the first change that a resumed run may not make."""
    for section, values in config.model_dump(mode="json").items():
        for key, value in values.items():
            before = was.get(section, {}).get(key, value)
            if before != value and not _may_change(section, key, config):
                return f"{section}.{key}", before, value
    return None


def _may_change(section: str, key: str, config: Config) -> bool:
    if (section, key) == ("run", "num_steps"):
        return not config.optimizer.depends_on_num_steps
    return section == "tracking" or key in MAY_CHANGE_ON_RESUME.get(section, ())


def special_tokens_of(tokenizer: Tokenizer, params: SamplingParams) -> dict[str, str]:
    """Ids that end a response, and ids that its text omits."""
    return {"stop ids": str([*params.stop_ids]), "special ids": str(sorted(tokenizer.hidden_ids))}


def digest_of_problems(problems: Sequence[Problem], with_prompts: bool = True) -> str:
    """Values that JSON does not have count by type alone."""
    digest = hashlib.sha256()
    for problem in problems:
        data = {key: value for key, value in problem.data.items() if with_prompts or key != "in_thought"}
        record = sorted(data.items(), key=lambda item: str(item[0]))
        facts = [problem.problem_id, problem.prompt_ids if with_prompts else (), record]
        text = json.dumps(facts, skipkeys=True, default=lambda value: type(value).__name__)
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def code_of(config: Config) -> dict[str, Path]:
    """Module → file."""
    found = {file_in(name) or split_name(name)[0]: source_of(name) for name in _names_of(config)}
    return {module: path for module, path in found.items() if path is not None}


def files_of(config: Config) -> dict[str, Path]:
    """Local files and folders that a run reads, by key."""
    named = {
        "model.path": config.model.path,
        "model.adapter": config.model.adapter,
        "drafter.path": config.drafter.path,
        "task.data": config.task.data,
        "evaluation.data": config.evaluation.data,
        **{f"the module {module}": path for module, path in code_of(config).items()},
    }
    return {key: path for key, path in named.items() if path is not None and path.exists()}


def _names_of(config: Config) -> Iterator[str]:
    yield config.task.name
    yield from config.rewards.functions
    environment = config.environment
    yield from (*environment.tools, *environment.factories.values())
    yield from filter(None, (environment.factory, environment.respond))
    for part in config.task.options.get("tasks", ()):
        if isinstance(part, Mapping) and isinstance(name := part.get("name"), str):
            yield name


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

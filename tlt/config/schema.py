"""The configuration of a run: TOML in, with `--section.key value` overrides; frozen and validated; resolved JSON out.

This file knows what a value may be, and nothing of what is done with it. Every mistake is one `UserError` line that
names the place, the value and the remedy; nothing that is misspelt is ignored.

    defaults below ◀ quickstart.toml ◀ --section.key value          later wins

Paths: a relative path in a TOML file is taken from that file's folder if it exists there, else from the working
directory. A relative path in an override, and `run.out_dir` always, is taken from the working directory. The resolved
configuration holds absolute paths, so it means the same in every process and for `--resume`.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from tlt.recipes import resolve_config
from tlt.types import Strategy, UserError

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
AnyPath = Annotated[Path, Field(strict=False)]

_DEFAULT_NUM_PROBLEMS = 4096
_DEFAULT_OUT_DIR = Path("runs/run")


def _mistake(message: str) -> PydanticCustomError:
    """A validator's complaint that reads as the second half of `place: section.key is value; <message>`."""
    return PydanticCustomError("mistake", "{message}", {"message": message})


class Section(BaseModel):
    """What all sections share: no unknown keys, no silent conversions, no later changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


class RunConfig(Section):
    """The process group, and where the run lives."""

    out_dir: AnyPath = _DEFAULT_OUT_DIR
    """Folder of everything the run writes; relative to the working directory."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of sampling, problem order and generated problems: the same seed gives the same run."""
    num_steps: PositiveInt = 100
    """Policy steps: rollout phase, then update."""
    num_ranks: PositiveInt = 2
    """Processes on this machine."""
    threads_per_rank: PositiveInt = 1
    """CPU threads of each process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where every rank can have a device of its own, else cpu."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the engine's weights and activations."""
    checkpoint_every: NonNegativeInt = 10
    """Steps between checkpoints; 0: only at the end."""
    time_limit_minutes: PositiveFloat | None = None
    """No step begins when it and the last evaluation would not end within this many minutes; None: no limit."""


class ModelConfig(Section):
    """The policy to start from."""

    path: AnyPath
    """A Hugging Face checkpoint folder: config.json, tokenizer, safetensors."""


class TaskConfig(Section):
    """What is trained on. Give `num_problems` or `problems_file`, not both."""

    name: Annotated[str, Field(min_length=1)]
    """A registered task such as "countdown", or "package.module:object"."""
    options: dict[str, Any] = {}
    """Keyword arguments of the task."""
    num_problems: PositiveInt | None = None
    """Generated training problems; each epoch shuffles them anew. None exactly when `problems_file` is set."""
    problems_file: AnyPath | None = None
    """JSONL of training problems, as `tlt task` writes it."""

    @model_validator(mode="before")
    @classmethod
    def _one_source_of_problems(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            has_number, has_file = (values.get(key) is not None for key in ("num_problems", "problems_file"))
            if has_number and has_file:
                raise _mistake("problems_file and num_problems exclude each other: remove one")
            if not has_number and not has_file:
                return {**values, "num_problems": _DEFAULT_NUM_PROBLEMS}
        return values


class RolloutConfig(Section):
    """How many responses a step generates, and how."""

    problems_per_step: PositiveInt = 8
    samples_per_problem: Annotated[int, Field(ge=2)] = 4
    """Size of a GRPO group; advantages compare its members, so at least 2."""
    max_batch_size: PositiveInt = 64
    """Sequences that one replica decodes at a time."""
    speculation: str = "off"
    """off, adaptive (the tuner chooses per step), or one fixed [drafter:]DEPTHxWIDTHxBUDGET, drafter being learned, ngram
    or hybrid."""
    migrate: bool = True
    """Whether a rank that has run dry takes over running responses of others, whose tokens it reads again."""
    tuner: Literal["cost-model", "beg-mab"] = "cost-model"
    """Who chooses when speculation is adaptive: measured costs and acceptance, or the bandit of the paper."""

    @field_validator("speculation")
    @classmethod
    def _is_strategy(cls, value: str) -> str:
        if value != "adaptive":
            try:
                Strategy.parse(value)
            except UserError:
                raise _mistake("give off, adaptive or DEPTHxWIDTHxBUDGET (budget >= depth) such as 4x1x4") from None
        return value


class SamplingConfig(Section):
    """How training responses are sampled. RL trains on the law it samples: truncation is off by default."""

    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_k: NonNegativeInt = 0
    """0 is off."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 is off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """0 is off."""
    max_tokens: PositiveInt = 2048
    """Longest response, in tokens."""


class DrafterConfig(Section):
    """The drafter, and how idle ranks train it."""

    path: AnyPath | None = None
    """A drafter folder as `tlt drafter train` writes it; None: no drafter."""
    train: bool = False
    """Whether idle ranks train it."""
    preset: Literal["eagle", "hass", "eagle3"] | None = None
    """How it is trained (docs/drafter.md); None: as it was trained before, which its folder says."""
    unrolled_steps: PositiveInt | None = None
    """Own steps that every pair is trained on. None, here and below: the preset's, whose sources drafting/losses.py names."""
    step_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Each step's loss counts so much of the one before."""
    feature_weight: NonNegativeFloat | None = None
    """Of Smooth L1 between the drafter's hidden state and the target's feature; eagle3 has no such loss."""
    distribution_weight: PositiveFloat | None = None
    """Of the cross-entropy between the two distributions."""
    learning_rate: PositiveFloat = 3e-4
    tokens_per_micro_step: PositiveInt = 1024
    """At most so many; fewer where a micro-step would take more than half a percent of a step."""
    buffer_mib: PositiveInt = 512
    """Responses and features kept to train on, per rank; the oldest features go first, then the oldest responses."""
    carry_longest: NonNegativeInt = 8
    """How many of the previous step's longest responses stay in the buffer."""
    max_passes: PositiveFloat | None = 4.0
    """Within a step a rank trains on at most so many times the response tokens in its buffer, then waits for more: little data
    and much idle time would end in learning by heart. None: no limit."""
    features: Literal["captured", "recomputed"] = "captured"
    """Whether what the engine captured while generating is trained on, or everything is recomputed when idle."""
    refresh_during_rollout: bool = False
    """Whether ranks that still generate take up the drafter that idle ones are training."""
    refresh_seconds: PositiveFloat = 1.0
    """At least so long between two refreshes."""
    clip_grad_norm: PositiveFloat = 1.0
    gate: NonNegativeFloat | None = None
    """Skips training in the step after one whose acceptance (a share) is not lower than after the last training by more than
    this; None: every step trains. Off, because idle time costs nothing."""
    check_every: PositiveInt = 1
    """Steps between two measurements of acceptance, by which the drafter is set aside and gated. That it is finite, the same on
    all ranks and arrived in the engine is checked in every step."""
    ranking: Literal["coupled", "top-k"] = "coupled"
    """Candidates by log q / tau + the target's own noise, or by log q alone (EAGLE-2). Changes the speed alone."""
    coupling_temperature: PositiveFloat | None = None
    """tau; None: tuned while running."""
    confidence_threshold: Annotated[float, Field(ge=0, lt=1)] = 0.4
    """A sequence's drafted chain stops where the chance that all of it is accepted falls below this; 0: never."""
    feature_window: Annotated[int, Field(ge=256)] = 4096
    """Latest positions per sequence whose features are remembered for a later switch on."""
    ngram_tokens: NonNegativeInt = 200_000
    """Response tokens indexed for retrieval, about 300 bytes each, per rank."""


class AlgorithmConfig(Section):
    """GRPO: group-normalized advantages, clipped ratio, token-level loss."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped above at 1 + clip_high (higher than clip_low, as in DAPO, arXiv 2503.14476)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the initial policy; at 0 that policy is not loaded."""
    normalize_advantages_by_std: bool = True
    """False: subtract the group's mean only (Dr. GRPO, arXiv 2503.20783)."""
    epochs: PositiveInt = 1
    """Passes over a step's responses."""
    minibatches: PositiveInt = 1
    """Optimizer updates per epoch."""
    tokens_per_micro_batch: PositiveInt = 8192
    """Bounds the memory of one forward and backward."""
    importance_correction_cap: PositiveFloat | None = None
    """Cap of the weight exp(trainer logprob - engine logprob) per token; None: no correction."""


class OptimizerConfig(Section):
    """AdamW for the policy."""

    learning_rate: PositiveFloat = 1e-6
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    """Policy steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; linear and cosine end at 0 with run.num_steps."""
    clip_grad_norm: PositiveFloat = 1.0


class EvaluationConfig(Section):
    """Held-out problems, drawn from the task's test split: the same at every evaluation."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before the first step and after the last."""
    num_problems: NonNegativeInt = 256
    """0: no evaluation."""
    samples_per_problem: PositiveInt = 4
    temperature: NonNegativeFloat = 1.0
    keep_best: bool = True
    """Also keep the policy of the best evaluation."""


class RewardsConfig(Section):
    """The worker processes that score responses while others still generate."""

    num_workers: NonNegativeInt = 1
    """0: the rank scores by itself and no time-out holds; for a task that is being written, or an object of a notebook."""
    timeout_seconds: PositiveFloat = 10.0
    """Of one response; past it the reward is 0, with the reason recorded."""


class Config(Section):
    """Everything a run depends on."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    sampling: SamplingConfig = SamplingConfig()
    drafter: DrafterConfig = DrafterConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    rewards: RewardsConfig = RewardsConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        num_responses = self.rollout.problems_per_step * self.rollout.samples_per_problem
        if self.drafter.path is None and self.drafter.train:
            raise _mistake("drafter.train is true but drafter.path is not set: give a drafter folder, or set it to false")
        if self.rollout.speculation not in ("off", "adaptive"):
            kind = Strategy.parse(self.rollout.speculation, "learned" if self.drafter.path else "ngram").drafter
            if kind not in ("learned", "ngram", "hybrid"):
                raise _mistake(f"rollout.speculation names the drafter {kind!r}: give learned, ngram or hybrid")
            if self.drafter.path is None and kind != "ngram":
                raise _mistake(
                    f"rollout.speculation is {self.rollout.speculation!r} but drafter.path is not set:"
                    " give a drafter folder, or use ngram, which needs none"
                )
        if self.task.num_problems is not None and self.task.num_problems < self.rollout.problems_per_step:
            raise _mistake(
                f"rollout.problems_per_step is {self.rollout.problems_per_step} but task.num_problems only"
                f" {self.task.num_problems}: a step would repeat a problem; raise the second or lower the first"
            )
        if self.algorithm.minibatches > num_responses:
            raise _mistake(
                f"algorithm.minibatches is {self.algorithm.minibatches} but a step has only {num_responses} responses: lower it"
            )
        return self

    def to_json(self) -> str:
        """The resolved configuration, every default written out; `Config.from_json` reads it back."""
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_json(text: str, place: str = "config.json") -> Config:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not JSON: {error}; restore the file the run wrote") from None
        return _validate(values, place, {})

    @property
    def content_hash(self) -> str:
        """16 hex digits that identify the resolved values."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


_PATH_KEYS = (("model", "path"), ("task", "problems_file"), ("drafter", "path"))


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Returns the configuration that `source` holds, with `overrides` on top.

    source: a TOML file (or resolved JSON file), a recipe's name such as "countdown", or the sections themselves.
    overrides: words of a command line, `--section.key value`, or {"section.key": value}.

    Raises UserError, one line, for a file that is missing or no TOML, a key that is unknown (the nearest is suggested),
    a value of the wrong type or out of range, an override without a value, and a path that leads nowhere.
    """
    if isinstance(source, Mapping):
        file, folder, values = "config", Path(), copy.deepcopy(dict(source))
    else:
        path = resolve_config(Path(source))
        file, folder, values = str(path), path.parent, _read_file(path)
    for section, key in _PATH_KEYS:
        if isinstance(table := values.get(section), dict) and isinstance(text := table.get(key), str | Path):
            table[key] = str(_resolve(str(text), folder))
    places = {}
    for name, keys, value in _read_overrides(overrides):
        _assign(values, name, keys, value)
        places[keys] = name
    run = values.setdefault("run", {})
    if isinstance(run, dict) and isinstance(out_dir := run.setdefault("out_dir", str(_DEFAULT_OUT_DIR)), str | Path):
        run["out_dir"] = str(Path(out_dir).absolute())
    config = _validate(values, file, places)
    _check_paths(config, file, places)
    return config


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a TOML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give the path of a TOML configuration") from None
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: cannot be parsed ({error}); correct that place") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no configuration; it must be a table of sections")
    return values


def _resolve(text: str, folder: Path) -> Path:
    """`text` as an absolute path: from `folder` if it exists there, else from the working directory."""
    there = folder / text
    return there.absolute() if there.exists() else Path(text).absolute()


# --------------------------------------------------------------------------------------------------------------------
# Overrides


def _read_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, tuple[str, ...], Any]]:
    """(how the user names it, keys, value) of every override."""
    if not isinstance(overrides, Mapping):
        return [(f"--{'.'.join(keys)}", keys, value) for keys, value in parse_overrides(overrides).items()]
    found = []
    for name, value in overrides.items():
        keys = tuple(name.split("."))
        if len(keys) < 2 or not all(keys):
            raise UserError(f"overrides[{name!r}]: unknown key; write section.key, such as run.seed")
        text = str(value) if isinstance(value, Path) else value
        found.append((f"overrides[{name!r}]", keys, _parse_value(keys, text) if isinstance(text, str) else value))
    return found


def parse_overrides(arguments: Sequence[str]) -> dict[tuple[str, ...], Any]:
    """`--section.key value` or `--section.key=value` pairs as {("section", "key"): value}; the last of a key wins."""
    found: dict[tuple[str, ...], Any] = {}
    pending = list(arguments)
    while pending:
        flag = pending.pop(0)
        name, has_equals, text = flag.removeprefix("--").partition("=")
        keys = tuple(name.split("."))
        if not flag.startswith("--") or not all(keys):
            raise UserError(f"{flag}: unexpected argument; an override is written --section.key value")
        if len(keys) < 2:
            raise UserError(f"{flag}: unknown option; an override is written --section.key value, such as --run.seed 1")
        if not has_equals:
            if not pending or pending[0].startswith("--"):
                raise UserError(f"--{name}: has no value; write --{name} VALUE")
            text = pending.pop(0)
        found[keys] = _parse_value(keys, text)
    return found


def _parse_value(keys: tuple[str, ...], text: str) -> Any:
    """Text stays text where the key takes text or a path; elsewhere it reads as in TOML. `none` unsets an optional key."""
    accepted = _accepted_types(keys)
    if type(None) in accepted and text.lower() == "none":
        return None
    if Path in accepted:
        return str(Path(text).absolute())
    if str in accepted:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _accepted_types(keys: tuple[str, ...]) -> set[Any]:
    """The plain types that a key accepts; empty for an unknown key and for a task's own options."""
    section = Config.model_fields.get(keys[0])
    field = section.annotation.model_fields.get(keys[1]) if section is not None and len(keys) == 2 else None  # type: ignore[union-attr]  # a Section, as all annotations of Config are
    found: set[Any] = set()
    pending = [field.annotation] if field is not None else []
    while pending:
        annotation: Any = pending.pop()
        origin = typing.get_origin(annotation)
        if origin in (typing.Union, types.UnionType):
            pending.extend(typing.get_args(annotation))
        elif origin is Annotated:
            pending.append(typing.get_args(annotation)[0])
        elif origin is Literal:
            found.update(type(value) for value in typing.get_args(annotation))
        else:
            found.add(annotation)
    return found


def _assign(values: dict[str, Any], name: str, keys: tuple[str, ...], value: Any) -> None:
    table = values
    for depth, key in enumerate(keys[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise UserError(f"{name}: {'.'.join(keys[:depth])} is a value, not a table; override it itself")
    # One source of problems replaces the other: an override is the user's latest word.
    if keys in (("task", "num_problems"), ("task", "problems_file")) and value is not None:
        table.pop({"num_problems": "problems_file", "problems_file": "num_problems"}[keys[-1]], None)
    table[keys[-1]] = value


# --------------------------------------------------------------------------------------------------------------------
# One line per mistake


def _validate(values: Any, file: str, places: Mapping[tuple[str, ...], str]) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        # An unknown key often explains the others (the key it was meant to be is then missing): report it first.
        details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
        raise UserError(_describe(details[0], file, places)) from None


def _describe(detail: ErrorDetails, file: str, places: Mapping[tuple[str, ...], str]) -> str:
    """`place: key is value; remedy`, in one line."""
    # A union's branch adds its own name to the location ("int", "function-…"): keep what names a key.
    location = [str(part) for part in detail["loc"]][: 2 if detail["type"] != "extra_forbidden" else None]
    key, value = ".".join(location), _shorten(detail.get("input"))
    place = places.get(tuple(location), file)
    match detail["type"]:
        case "mistake" if len(location) < 2:
            return " ".join(part for part in (f"{file}:", f"{key}:" if key else "", detail["msg"]) if part)
        case "extra_forbidden":
            return f"{place}: {key} is unknown; {_suggest(location)}"
        case "missing":
            return f"{place}: {key} is missing; {_remedy_for_missing(location)}"
        case "model_type" | "model_attributes_type":
            return f"{place}: {key or 'the file'} is {value}; it must be a table of keys"
        case "mistake":
            remedy = detail["msg"]
        case _:
            remedy = detail["msg"].replace("Input should be", "it must be", 1).replace("Value should", "it must", 1)
            remedy = remedy[:1].lower() + remedy[1:]
    return f"{place}: {key} is {value}; {remedy}"


def _suggest(location: Sequence[str]) -> str:
    known = list(Config.model_fields)
    prefix = ""
    if len(location) > 1:
        annotation = Config.model_fields[location[0]].annotation
        known, prefix = list(annotation.model_fields), f"{location[0]}."  # type: ignore[union-attr]  # a Section
    if nearest := difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5):
        return f"did you mean {prefix}{nearest[0]}?"
    return f"known {'keys' if prefix else 'sections'} are {', '.join(known)}"


def _remedy_for_missing(location: Sequence[str]) -> str:
    if len(location) == 1:
        return f"add a section [{location[0]}]"
    return f"add it to section [{location[0]}], or give --{'.'.join(location)} VALUE"


def _check_paths(config: Config, file: str, places: Mapping[tuple[str, ...], str]) -> None:
    """Inputs that lead nowhere are a mistake now, not after the ranks have started."""
    for section, key in _PATH_KEYS:
        path: Path | None = getattr(getattr(config, section), key)
        place = places.get((section, key), file)
        wants_folder = key == "path"
        if path is not None and not (path.is_dir() if wants_folder else path.is_file()):
            kind = "folder" if wants_folder else "file"
            raise UserError(f"{place}: {section}.{key} is {path}; there is no such {kind}: give one that exists")


def _shorten(value: Any, limit: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"

"""The configuration of a run: sections of keys, each with its type, range, default and help. Does not know where values come
from (load.py), nor what is done with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tlt.config.mistakes import mistake, validate
from tlt.types import Strategy, UserError

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
AnyPath = Annotated[Path, Field(strict=False)]

_DEFAULT_NUM_PROBLEMS = 4096
DEFAULT_OUT_DIR = Path("runs/run")


class Section(BaseModel):
    """The base of all sections: no unknown keys, no silent conversions, no later changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


class RunSection(Section):
    """The process group, and where the run lives."""

    out_dir: AnyPath = DEFAULT_OUT_DIR
    """Folder of everything the run writes; relative to the working directory."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of sampling, problem order and generated problems: the same seed gives the same run."""
    num_steps: PositiveInt = 100
    """Policy steps of the run; each is a rollout phase, then an update."""
    num_ranks: PositiveInt = 2
    """Processes on this machine."""
    threads_per_rank: PositiveInt = 1
    """CPU threads of each process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that ranks compute on; auto takes GPUs where every rank can have one of its own, else the CPU."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Number type of the engine's weights and activations."""
    checkpoint_every: NonNegativeInt = 10
    """Steps between checkpoints; 0: only at the end."""
    time_limit_minutes: PositiveFloat | None = None
    """No step begins when it and the last evaluation would not end within this many minutes; None: no limit."""


class ModelSection(Section):
    """The policy to start from."""

    path: AnyPath
    """A Hugging Face checkpoint folder: config.json, tokenizer, safetensors."""


class TaskSection(Section):
    """The training problems: `num_problems` generated ones or those of a `problems_file`. --task.options.KEY VALUE sets an
    option of the task's own."""

    name: Annotated[str, Field(min_length=1)] = "data"
    """A registered task such as "countdown", a member of a family such as "reasoning-gym:chain_sum", or
    "package.module:object". "data" is a file's rows, scored by rewards.functions alone."""
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
                raise mistake("problems_file and num_problems exclude each other: remove one")
            if not has_number and not has_file:
                return {**values, "num_problems": _DEFAULT_NUM_PROBLEMS}
        return values


class RolloutSection(Section):
    """The responses of a step: their number, and how they are generated."""

    problems_per_step: PositiveInt = 8
    """Problems that a step answers."""
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
                raise mistake("give off, adaptive or DEPTHxWIDTHxBUDGET (budget >= depth) such as 4x1x4") from None
        return value


class SamplingSection(Section):
    """The sampling of training responses. RL trains on the law it samples: truncation is off by default."""

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; at 0 the most probable token is taken."""
    top_k: NonNegativeInt = 0
    """Draws from this many of the most probable tokens; 0 keeps all tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draws from the fewest tokens that hold this probability; 1 keeps all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drops tokens less probable than this share of the most probable one; 0 keeps all tokens."""
    max_tokens: PositiveInt = 2048
    """Longest response, in tokens."""


class DrafterSection(Section):
    """The drafter, and how idle ranks train it."""

    path: AnyPath | None = None
    """A drafter folder as `tlt drafter train` writes it; None: no drafter."""
    train: bool = False
    """Whether idle ranks train it."""
    preset: Literal["eagle", "hass", "eagle3"] | None = None
    """Form of the drafter's training (docs/drafter.md); None: as it was trained before, which its folder says."""
    unrolled_steps: PositiveInt | None = None
    """The drafter's own steps that every pair of tokens is trained on; None: the preset's number (drafter/losses.py)."""
    step_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Weight of each own step's loss, as a share of the step before; None: the preset's."""
    feature_weight: NonNegativeFloat | None = None
    """Weight of the Smooth L1 loss between the drafter's hidden state and the target's feature; None: the preset's. eagle3 has
    no such loss."""
    distribution_weight: PositiveFloat | None = None
    """Weight of the cross-entropy between the target's distribution and the drafter's; None: the preset's."""
    learning_rate: PositiveFloat = 3e-4
    tokens_per_micro_step: PositiveInt = 1024
    """Most tokens of one optimizer step; fewer where it would take more than half a percent of a policy step."""
    buffer_mib: PositiveInt = 512
    """Responses and features kept to train on, per rank; the oldest features go first, then the oldest responses."""
    carry_longest: NonNegativeInt = 8
    """Number of the previous step's longest responses that stay in the buffer."""
    max_passes: PositiveFloat | None = 4.0
    """Within a step a rank trains on at most so many times the response tokens in its buffer, then waits for more: little data
    and much idle time would end in learning by heart. None: no limit."""
    features: Literal["captured", "recomputed"] = "captured"
    """Features that the drafter is trained on: those that the engine captured while generating, or recomputed ones."""
    refresh_during_rollout: bool = False
    """Whether ranks that still generate take up the drafter that idle ones are training."""
    refresh_seconds: PositiveFloat = 1.0
    """Least seconds between two refreshes of the drafter during a rollout."""
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


class AlgorithmSection(Section):
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


class OptimizerSection(Section):
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

    @property
    def depends_on_num_steps(self) -> bool:
        """Whether another run.num_steps changes the learning rate of steps that lie before it."""
        return self.schedule != "constant"


class EvaluationSection(Section):
    """Held-out problems, drawn from the task's test split: the same at every evaluation."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before the first step and after the last."""
    num_problems: NonNegativeInt = 256
    """Held-out problems of an evaluation; 0: no evaluation."""
    samples_per_problem: PositiveInt = 4
    temperature: NonNegativeFloat = 1.0
    keep_best: bool = True
    """Also keep the policy of the best evaluation."""


class RewardsSection(Section):
    """The score of a response, and the worker processes that compute it while others still generate (docs/tasks.md)."""

    functions: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Reward functions in TRL's signature as "package.module:object", and "task" for the task's own score; none: that alone."""
    weights: Annotated[tuple[float, ...], Field(strict=False)] = ()
    """Weights of the functions in the sum that is the reward; none: 1 each."""
    solved_at: float = 1.0
    """A response is solved from this reward on, where "task", which says so itself, is not among the functions."""
    num_workers: NonNegativeInt = 1
    """0: the rank scores by itself and no time-out holds; for a task that is being written, or an object of a notebook."""
    timeout_seconds: PositiveFloat = 10.0
    """Time limit of scoring one response; past it the response has no score, and the reason is recorded."""

    @model_validator(mode="after")
    def _a_weight_for_each(self) -> RewardsSection:
        if self.weights and len(self.weights) != len(self.functions):
            raise mistake(f"weights has {len(self.weights)} values for {len(self.functions)} functions: give each its weight")
        if len(set(self.functions)) < len(self.functions):
            raise mistake(f"functions names one twice ({', '.join(self.functions)}): give it once")
        return self


class Config(Section):
    """Everything a run depends on."""

    run: RunSection = RunSection()
    model: ModelSection
    task: TaskSection
    rollout: RolloutSection = RolloutSection()
    sampling: SamplingSection = SamplingSection()
    drafter: DrafterSection = DrafterSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    evaluation: EvaluationSection = EvaluationSection()
    rewards: RewardsSection = RewardsSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        num_responses = self.rollout.problems_per_step * self.rollout.samples_per_problem
        if self.drafter.path is None and self.drafter.train:
            raise mistake("drafter.train is true but drafter.path is not set: give a drafter folder, or set it to false")
        if self.rollout.speculation not in ("off", "adaptive"):
            kind = Strategy.parse(self.rollout.speculation, "learned" if self.drafter.path else "ngram").drafter
            if kind not in ("learned", "ngram", "hybrid"):
                raise mistake(f"rollout.speculation names the drafter {kind!r}: give learned, ngram or hybrid")
            if self.drafter.path is None and kind != "ngram":
                raise mistake(
                    f"rollout.speculation is {self.rollout.speculation!r} but drafter.path is not set:"
                    " give a drafter folder, or use ngram, which needs none"
                )
        if self.task.name == "data" and not set(self.rewards.functions) - {"task"}:
            raise mistake("task.name is 'data' (the default), which scores nothing: give a task.name, or rewards.functions")
        if self.task.num_problems is not None and self.task.num_problems < self.rollout.problems_per_step:
            raise mistake(
                f"rollout.problems_per_step is {self.rollout.problems_per_step} but task.num_problems only"
                f" {self.task.num_problems}: a step would repeat a problem; raise the second or lower the first"
            )
        if self.algorithm.minibatches > num_responses:
            raise mistake(
                f"algorithm.minibatches is {self.algorithm.minibatches} but a step has only {num_responses} responses: lower it"
            )
        return self

    def to_json(self) -> str:
        """Returns the resolved configuration with every default written out; `Config.from_json` reads it back."""
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_json(text: str, place: str = "config.json") -> Config:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not JSON: {error}; restore the file the run wrote") from None
        return validate(Config, values, place)

    @property
    def content_hash(self) -> str:
        """16 hex digits that identify the resolved values."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

"""The configuration of a run: sections of keys, each with its type, range, default and help. Does not know where values come
from (load.py), nor what is done with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tlt.config.algorithm import AlgorithmSection
from tlt.config.mistakes import mistake, validate
from tlt.config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from tlt.types import Strategy, UserError

AnyPath = Annotated[Path, Field(strict=False)]

_DEFAULT_NUM_PROBLEMS = 4096
DEFAULT_OUT_DIR = Path("runs/run")


def _split(value: Any) -> Any:
    """Returns the words of a text with commas between them; anything else as it is."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


class RunSection(Section):
    """Where the run lives, how long it goes on, and what it computes with."""

    out_dir: AnyPath = DEFAULT_OUT_DIR
    """Folder of everything the run writes; relative to the working directory."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of sampling, problem order and generated problems: the same seed gives the same run."""
    num_steps: PositiveInt = 100
    """Policy steps of the run; each generates responses, then updates the policy."""
    num_ranks: PositiveInt = 2
    """Processes that train on this machine; each holds the whole model."""
    threads_per_rank: PositiveInt = 1
    """CPU threads of each rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that ranks compute on; auto takes GPUs where every rank can have one of its own, else the CPU."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Number type of the engine's weights and activations."""
    checkpoint_every: NonNegativeInt = 10
    """Policy steps between checkpoints; 0: only at the end."""
    time_limit_minutes: PositiveFloat | None = None
    """No step begins when it and the last evaluation would not end within this many minutes; None: no limit."""


class ModelSection(Section):
    """The policy to start from."""

    path: AnyPath
    """The Hugging Face checkpoint folder to train: config.json, tokenizer, safetensors."""


class TaskSection(Section):
    """The task, and its training problems. --task.options.KEY VALUE sets an option of the task's own; --task.options {} removes
    all that the file sets."""

    name: Annotated[str, Field(min_length=1)]
    """A task that comes with TLT, such as countdown, or your own as package.module:object."""
    options: dict[str, Any] = Field(default={})
    """The task's own options, given to its problems() as keyword arguments."""
    num_problems: PositiveInt | None = None
    """Number of training problems that the task makes, shuffled anew in each epoch; 4096 unless problems_file gives them."""
    problems_file: AnyPath | None = None
    """JSONL of training problems (prompt, prompt_ids or messages, and what the task scores by); instead of num_problems."""

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
    """The responses of a policy step: how many, and how they are generated."""

    problems_per_step: PositiveInt = 8
    """Problems that each policy step answers."""
    samples_per_problem: Annotated[int, Field(ge=2)] = 4
    """Responses to each problem of a step, a GRPO group: advantages compare them, so at least 2."""
    max_batch_size: PositiveInt = 64
    """Sequences that each rank decodes at a time."""
    speculation: str = "off"
    """How tokens are drafted: off, adaptive (chosen at every step), or a fixed [drafter:]DEPTHxWIDTHxBUDGET such as 4x1x4.
    The drafter is learned, ngram (retrieval from the problem's own responses) or hybrid."""
    migrate: bool = True
    """Whether a rank without work takes over running responses of another; it has to prefill their tokens again."""
    tuner: Literal["cost-model", "beg-mab"] = "cost-model"
    """What chooses adaptive speculation: measured costs and acceptance (cost-model), or the TLT paper's bandit (beg-mab)."""

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
    """Length at which a training response is cut off, in tokens."""


class DrafterSection(Section):
    """The drafter, and how idle ranks train it."""

    path: AnyPath | None = None
    """A drafter folder, as tlt drafter train writes it; None: drafts come from retrieval alone."""
    train: bool = False
    """Whether idle ranks train the drafter."""
    preset: Literal["eagle", "hass", "eagle3"] | None = None
    """How the drafter is trained (docs/drafter.md); None: by the preset that its folder names."""
    unrolled_steps: PositiveInt | None = None
    """Steps for which the drafter's training feeds it its own outputs; None: the preset's number."""
    step_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Weight of each unrolled step's loss in the drafter's training, as a share of the step before; None: the preset's."""
    feature_weight: NonNegativeFloat | None = None
    """Weight of the Smooth L1 loss between the drafter's hidden state and the target's feature; None: the preset's.
    eagle3 has no such loss."""
    distribution_weight: PositiveFloat | None = None
    """Weight of the cross-entropy between the target's distribution and the drafter's; None: the preset's."""
    learning_rate: PositiveFloat = 3e-4
    """Learning rate of the drafter's training in idle time."""
    tokens_per_micro_step: PositiveInt = 1024
    """Most tokens of one optimizer step of the drafter; fewer where it would take over half a percent of a policy step."""
    buffer_mib: PositiveInt = 512
    """MiB of responses and features that each rank keeps to train the drafter on; the oldest are dropped first."""
    carry_longest: NonNegativeInt = 8
    """Number of the previous step's longest responses that the drafter is trained on again."""
    max_passes: PositiveFloat | None = 4.0
    """Most passes of the drafter's training over its responses in one policy step, so that it does not learn them by heart.
    None: no limit."""
    features: Literal["captured", "recomputed"] = "captured"
    """Features that the drafter is trained on: those that the engine captured while generating, or recomputed ones."""
    refresh_during_rollout: bool = False
    """Whether ranks that still generate take up the drafter that idle ranks are training."""
    refresh_seconds: PositiveFloat = 1.0
    """Least seconds between two refreshes of the drafter during a rollout."""
    clip_grad_norm: PositiveFloat = 1.0
    """Largest gradient norm of the drafter's training."""
    gate: NonNegativeFloat | None = None
    """Trains the drafter only after its acceptance, a share, has fallen by more than this since its last training.
    None: it is trained in every step, since idle time costs nothing."""
    check_every: PositiveInt = 1
    """Policy steps between measurements of the drafter's acceptance; while that is bad, drafts come from retrieval instead.
    That the drafter is finite and the same on all ranks is checked in every step."""
    ranking: Literal["coupled", "top-k"] = "coupled"
    """Drafts are ranked by log q / tau + the sampling noise (coupled) or by log q (top-k, EAGLE-2). Changes the speed alone."""
    coupling_temperature: PositiveFloat | None = None
    """Temperature tau of the coupled ranking; None: tuned while running."""
    confidence_threshold: Annotated[float, Field(ge=0, lt=1)] = 0.4
    """Drafting a chain stops where the chance that the whole chain is accepted falls below this; 0: never."""
    feature_window: Annotated[int, Field(ge=256)] = 4096
    """Latest positions of each sequence whose features are kept, so that the drafter can be switched on later."""
    ngram_tokens: NonNegativeInt = 200_000
    """Response tokens that each rank indexes for drafts by retrieval; about 300 bytes each."""


class OptimizerSection(Section):
    """AdamW for the policy."""

    learning_rate: PositiveFloat = 1e-6
    """Learning rate of the policy after the warm-up."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay rate of the mean gradient."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay rate of the mean squared gradient."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay of the policy."""
    warmup_steps: NonNegativeInt = 0
    """Policy steps in which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at run.num_steps."""
    clip_grad_norm: PositiveFloat = 1.0
    """Largest gradient norm of the policy."""

    @property
    def depends_on_num_steps(self) -> bool:
        """Whether another run.num_steps changes the learning rate of steps that lie before it."""
        return self.schedule != "constant"


class EvaluationSection(Section):
    """Held-out problems, drawn from the task's test split: the same at every evaluation."""

    every: NonNegativeInt = 0
    """Policy steps between evaluations; 0: only before the first step and after the last."""
    num_problems: NonNegativeInt = 256
    """Held-out problems of an evaluation; 0: no evaluation."""
    samples_per_problem: PositiveInt = 4
    """Responses to each held-out problem."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature of evaluations; at 0 the most probable token is taken."""
    keep_best: bool = True
    """Also keep the policy of the best evaluation."""


class RewardsSection(Section):
    """The worker processes that score responses while others still generate."""

    num_workers: NonNegativeInt = 1
    """Worker processes of each rank that score responses; 0: the rank scores itself, without time-out, as in a notebook."""
    timeout_seconds: PositiveFloat = 10.0
    """Time limit of scoring one response; past it the response has no score, and the reason is recorded."""


class TrackingSection(Section):
    """Trackers that get the figures of metrics.jsonl as well (docs/tracking.md). None of them can stop a run."""

    use: Annotated[list[str], BeforeValidator(_split)] = Field(default=[])
    """Any of wandb, tensorboard and trackio, or your own as "package.module:Class"; on the command line with commas between."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """The project of the run there; None: what WANDB_PROJECT says, else tlt."""
    run_name: Annotated[str, Field(min_length=1)] | None = None
    """The name of the run there; None: that of run.out_dir."""


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
    tracking: TrackingSection = TrackingSection()

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
        if self.task.num_problems is not None and self.task.num_problems < self.rollout.problems_per_step:
            raise mistake(
                f"rollout.problems_per_step is {self.rollout.problems_per_step} but task.num_problems only"
                f" {self.task.num_problems}: a step would repeat a problem; raise the second or lower the first"
            )
        if self.algorithm.minibatches > num_responses:
            raise mistake(
                f"algorithm.minibatches is {self.algorithm.minibatches} but a step has only {num_responses} responses: lower it"
            )
        buffer, limit = self.algorithm.overlong_buffer_tokens or 0, self.sampling.max_tokens
        if buffer > limit:
            raise mistake(f"algorithm.overlong_buffer_tokens is {buffer} but sampling.max_tokens only {limit}: lower it")
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

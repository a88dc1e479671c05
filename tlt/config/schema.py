"""The configuration of a run: sections of keys, each with its type, range, default and help. Does not know
where values come from (load.py), nor what is done with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tlt.config.algorithm import AlgorithmSection
from tlt.config.drafter import DrafterSection
from tlt.config.engine import DeviceSection, EngineSection
from tlt.config.lora import LoraSection
from tlt.config.mistakes import mistake, validate
from tlt.config.rewards import RewardsSection
from tlt.config.sampling import SamplingSection
from tlt.config.section import AnyPath, Section, split_words
from tlt.config.vllm import VllmSection
from tlt.kinds import (
    Epsilon,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problems,
    Processes,
    ProperShare,
    Samples,
    Seconds,
    Seed,
    Temperature,
    Threads,
    WeightDecay,
)
from tlt.speculative.strategy import Strategy
from tlt.types import UserError

_DEFAULT_NUM_PROBLEMS = 4096
DEFAULT_OUT_DIR = Path("runs/run")


def may_use_references(speculation: str, tuner: str = "cost-model") -> bool:
    """Returns whether references are drafted from with this speculation (docs/ahead.md)."""
    return tuner == "cost-model" if speculation == "adaptive" else Strategy.parse(speculation).uses_references


class RunSection(DeviceSection):
    """Where the run lives, how long it goes on, and what it computes with."""

    out_dir: AnyPath = DEFAULT_OUT_DIR
    """Folder of everything the run writes; relative to the working directory."""
    seed: Seed = 0
    """Seed of sampling, problem order and generated problems: the same seed gives the same run."""
    num_steps: NonNegativeInt = 100
    """Policy steps of the run; each generates responses, then updates the policy. 0: nothing is trained,
    only evaluated."""
    num_ranks: Processes | None = None
    """Processes that train, on all machines; none: one for each GPU that run.device may use, or 2 on CPUs.
    What torchrun or srun have started goes before it."""
    launcher: Literal["local", "ray"] = "local"
    """Who starts the ranks: this machine (local), or an existing Ray cluster (ray). torchrun and srun have
    done it already."""
    max_restarts: NonNegativeInt = 3
    """Times that all ranks are started again, from what is saved, after one has died or failed; torchrun
    counts its own."""
    timeout_seconds: Annotated[Seconds, Field(ge=1)] = 600.0
    """Seconds for which a rank waits for the others, in a collective or for a sign of life, before it
    gives the attempt up."""
    threads_per_rank: Threads = 1
    """CPU threads of each rank."""
    checkpoint_every: NonNegativeInt = 10
    """Policy steps between checkpoints; 0: only at the end."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that stay in the run's folder; older ones are removed when a new one is complete."""
    journal: bool = True
    """Whether responses are kept on disk as they are generated, so that a run that goes on generates none
    of them twice."""
    keep_responses: bool = False
    """Whether the responses of every step and evaluation are kept with their rewards, as JSON lines in the
    folder responses: to be read, and for --replay."""
    time_limit_minutes: PositiveFloat | None = None
    """No step begins when it and the last evaluation would not end within this many minutes; None: no
    limit."""


class ParallelSection(Section):
    """How the policy's training state lies on the ranks, and what its update computes in
    (docs/parallel.md)."""

    policy: Literal["auto", "replicate", "fsdp"] = "auto"
    """Whether every rank holds the whole policy with gradients and optimizer (replicate) or a slice of
    them (fsdp); auto shards where several ranks have GPUs, and replicates elsewhere."""
    param_dtype: Literal["float32", "float64", "bfloat16"] | None = None
    """Number type that the update of a sharded policy computes in, such as bfloat16; weights, gradients
    and optimizer stay in float32. None: it computes in the type of the weights."""
    checkpoint_activations: bool = False
    """Whether the update keeps only each layer's input and computes the layer once more in the backward
    pass: a third more time, and far less memory for long responses."""
    reduce_each_micro_batch: bool = True
    """Whether a sharded policy's gradients are summed over the ranks after every micro-batch. If false
    they are summed once per optimizer step: less traffic, but every rank then holds the gradients of the
    whole policy."""


class ModelSection(Section):
    """The policy to start from. --model.chat_template_kwargs.KEY VALUE sets a variable of the tokenizer's
    chat template, such as enable_thinking; --model.chat_template_kwargs {} removes all that the file sets."""

    path: AnyPath
    """The Hugging Face checkpoint folder to train (config.json, tokenizer, safetensors), or OWNER/NAME on
    the hub."""
    revision: str | None = None
    """Branch, tag or commit of a model of the hub; None: main. A run notes the commit that it has found
    and stays with it."""
    adapter: AnyPath | None = None
    """Adapter to start from: a LoRA folder as PEFT saves it, or OWNER/NAME on the hub. It is merged into
    the model; a run that trains adapters itself trains this one on, and `lora` must describe it."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables for the tokenizer's chat template."""


class TaskSection(Section):
    """The task, its training problems, and how prompts are written (docs/data.md). --task.options.KEY
    VALUE sets an option of the task's own; --task.options {} removes all that the file sets."""

    name: Annotated[str, Field(min_length=1)] = "data"
    """A task that comes with TLT, such as countdown, or your own as package.module:object (docs/tasks.md).
    The default stands for the rows of task.data, scored by rewards.functions alone."""
    options: dict[str, Any] = Field(default={})
    """The task's own options, given to its problems() as keyword arguments."""
    num_problems: Problems | None = None
    """Number of training problems that the task makes, shuffled anew in each epoch; 4096 unless data gives
    them."""
    data: AnyPath | None = None
    """Training problems, instead of num_problems: a JSONL or Parquet file, a folder of them or of
    save_to_disk, or a dataset of the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION."""
    subset: str | None = None
    """Configuration of the dataset, such as "main"; None: its default."""
    split: str | None = None
    """Split of the dataset, such as "train" or "train[:1000]"; None: the only one, else train."""
    columns: dict[str, str] = Field(default={})
    """The dataset's names of columns, by ours: {prompt = "question"}. The others keep their names."""
    chat: bool = False
    """Whether a text prompt goes into the tokenizer's chat template, as the user's message; messages
    always do."""
    system_prompt: str | None = None
    """System message to begin every prompt with; text prompts then become the user's message."""

    @model_validator(mode="before")
    @classmethod
    def _one_source_of_problems(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            has_number, has_data = (values.get(key) is not None for key in ("num_problems", "data"))
            if has_number and has_data:
                raise mistake("data and num_problems exclude each other: remove one")
            if not has_data and (
                key := next((key for key in ("subset", "split", "columns") if values.get(key)), None)
            ):
                raise mistake(
                    f"{key} is set but data, which it belongs to, is not: set data, or remove {key}"
                )
            if not has_number and not has_data:
                return {**values, "num_problems": _DEFAULT_NUM_PROBLEMS}
        return values


class RolloutSection(EngineSection):
    """The responses of a policy step: how many, and how they are generated."""

    problems_per_step: Problems = 8
    """Problems that each policy step answers."""
    samples_per_problem: Annotated[Samples, Field(ge=2)] = 4
    """Responses to each problem of a step, a GRPO group: advantages compare them, so at least 2."""
    speculation: str = "off"
    """How tokens are drafted: off, adaptive (chosen at every step), or a fixed
    [drafter:]DEPTHxWIDTHxBUDGET such as 4x1x4. The drafter is learned, ngram (retrieval from the problem's
    own responses) or hybrid; ahead, or ahead+hybrid, drafts from responses that were drawn before with the
    same noise (docs/ahead.md)."""
    migrate: bool = True
    """Whether a rank without work takes over running responses of another; it has to prefill their tokens
    again."""
    ahead: Literal[0, 1, 2, "adaptive"] = 0
    """Policy steps whose responses ranks without work generate ahead, with their own noise; that step
    drafts from them, and draws the same tokens as without (docs/ahead.md). adaptive: two, where it is
    worth more than other uses of idle time."""
    replay: AnyPath | None = None
    """Folder of a run with the same seed, task and prompts that has kept its responses
    (run.keep_responses): this one drafts from them, step by step, and draws the same tokens as without
    (docs/ahead.md). tlt train --replay RUN sets it."""
    references_mib: NonNegativeFloat = 64.0
    """MiB of responses that are kept on each rank to draft later ones from that are drawn with the same
    noise, such as those of the last evaluation (docs/ahead.md); four bytes a token; 0: none. Used with
    adaptive speculation by the cost model."""
    tuner: Literal["cost-model", "beg-mab"] = "cost-model"
    """What chooses adaptive speculation: measured costs and acceptance (cost-model), or the TLT paper's
    bandit (beg-mab)."""

    @property
    def steps_ahead(self) -> int:
        """The most policy steps whose responses are generated ahead. For `adaptive` two: more brought no more
        (benchmarks/log.md)."""
        return 2 if self.ahead == "adaptive" else self.ahead

    @property
    def compares_idle_work(self) -> bool:
        """Whether idle ranks generate ahead only where that is worth more than their other work."""
        return self.ahead == "adaptive"

    @property
    def uses_references(self) -> bool:
        """Whether responses that were drawn before with the same noise are drafted from."""
        return self.references_mib > 0 and may_use_references(self.speculation, self.tuner)

    @property
    def asks_for_references(self) -> bool:
        """Whether the user asks for it, and does not only leave it to adaptive speculation."""
        is_fixed = self.speculation != "adaptive" and may_use_references(self.speculation)
        return self.steps_ahead > 0 or self.replay is not None or is_fixed

    @field_validator("speculation")
    @classmethod
    def _is_strategy(cls, value: str) -> str:
        if value != "adaptive":
            try:
                Strategy.parse(value)
            except UserError:
                raise mistake(
                    "give off, adaptive or DEPTHxWIDTHxBUDGET (budget >= depth) such as 4x1x4"
                ) from None
        return value


class OptimizerSection(Section):
    """AdamW for the policy."""

    learning_rate: LearningRate = 1e-6
    """Learning rate of the policy after the warm-up."""
    beta1: ProperShare = 0.9
    """AdamW's decay rate of the mean gradient."""
    beta2: ProperShare = 0.95
    """AdamW's decay rate of the mean squared gradient."""
    eps: Epsilon = 1e-8
    """AdamW's epsilon."""
    weight_decay: WeightDecay = 0.0
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
    """Held-out problems, the same at every evaluation: the test problems that the task makes, or the first
    of `data` or of another `split` of task.data."""

    every: NonNegativeInt = 0
    """Policy steps between evaluations; 0: only before the first step and after the last."""
    num_problems: Annotated[int, Field(ge=0, le=2**24)] = 256
    """Held-out problems of an evaluation; 0: no evaluation."""
    data: AnyPath | None = None
    """Held-out problems: a file, folder or dataset as for task.data; None: task.data where `split` is set."""
    subset: str | None = None
    """Configuration of the dataset; None: its default, and for task.data that of the training problems."""
    split: str | None = None
    """Split of the dataset; None: the only one, else test."""
    columns: dict[str, str] | None = None
    """The dataset's names of columns, by ours; None: as for task.data."""
    samples_per_problem: Samples = 4
    """Responses to each held-out problem."""
    temperature: Temperature = 1.0
    """Sampling temperature of evaluations; at 0 the most probable token is taken."""
    keep_best: bool = True
    """Also keep the policy of the best evaluation: by solve rate, or by mean reward where
    rewards.functions alone score."""


class TrackingSection(Section):
    """Trackers that get the figures of metrics.jsonl as well (docs/tracking.md). None of them can stop a
    run."""

    use: Annotated[list[str], BeforeValidator(split_words)] = Field(default=[])
    """Any of wandb, tensorboard, trackio, mlflow, swanlab, comet_ml, aim, clearml and dvclive, or your own as
    "package.module:Class"; on the command line with commas between."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """The project of the run there; None: what WANDB_PROJECT says, else tlt."""
    run_name: Annotated[str, Field(min_length=1)] | None = None
    """The name of the run there; None: that of run.out_dir."""


class Config(Section):
    """Everything a run depends on."""

    run: RunSection = RunSection()
    parallel: ParallelSection = ParallelSection()
    model: ModelSection
    lora: LoraSection = LoraSection()
    task: TaskSection
    rollout: RolloutSection = RolloutSection()
    vllm: VllmSection = VllmSection()
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
            raise mistake(
                "drafter.train is true but drafter.path is not set: give a drafter folder, or set it to false"
            )
        if self.rollout.speculation not in ("off", "adaptive"):
            kind = Strategy.parse(
                self.rollout.speculation, "learned" if self.drafter.path else "ngram"
            ).drafter
            other = kind.removeprefix("ahead+")
            if other not in ("learned", "ngram", "hybrid", "ahead"):
                raise mistake(
                    f"rollout.speculation names the drafter {kind!r}: give learned, ngram, hybrid or ahead"
                )
            if self.drafter.path is None and other not in ("ngram", "ahead"):
                raise mistake(
                    f"rollout.speculation is {self.rollout.speculation!r} but drafter.path is not set:"
                    " give a drafter folder, or use ngram, which needs none"
                )
        asked = {"ahead": self.rollout.ahead, "replay": self.rollout.replay}
        if not self.rollout.uses_references and (
            key := next((key for key, value in asked.items() if value), None)
        ):
            what = "what is generated" if key == "ahead" else "that run's responses"
            remedy = "leave it out, or give speculation adaptive, tuner cost-model and references_mib above 0"
            raise mistake(f"rollout.{key} is {asked[key]}, but nothing would draft from {what}: {remedy}")
        if (
            self.task.data is None
            and self.evaluation.data is None
            and (self.evaluation.split or self.evaluation.subset)
        ):
            raise mistake(
                "evaluation.split and evaluation.subset need data: set evaluation.data or task.data, or "
                "remove them"
            )
        if self.task.name == "data" and not set(self.rewards.functions) - {"task"}:
            raise mistake(
                "task.name is 'data' (the default), which scores nothing: give a task.name, or "
                "rewards.functions"
            )
        if not self.run.num_steps and not self.evaluation.num_problems:
            raise mistake(
                "run.num_steps and evaluation.num_problems are both 0: nothing would be done; raise one of "
                "them"
            )
        if self.task.num_problems is not None and self.task.num_problems < self.rollout.problems_per_step:
            raise mistake(
                f"rollout.problems_per_step is {self.rollout.problems_per_step} but task.num_problems only"
                f" {self.task.num_problems}: a step would repeat a problem; raise the second or lower the "
                "first"
            )
        if self.algorithm.minibatches > num_responses:
            raise mistake(
                f"algorithm.minibatches is {self.algorithm.minibatches} but a step has only {num_responses} "
                "responses: lower it"
            )
        buffer, limit = self.algorithm.overlong_buffer_tokens or 0, self.sampling.max_tokens
        if buffer > limit:
            raise mistake(
                f"algorithm.overlong_buffer_tokens is {buffer} but sampling.max_tokens only {limit}: lower it"
            )
        return self

    def to_json(self) -> str:
        """Returns the resolved configuration with every default written out; `Config.from_json` reads it
        back."""
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_json(text: str, place: str = "config.json") -> Config:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not JSON: {error}; restore the file the run wrote") from None
        return validate(Config, values, place)

"""The configuration of a run: sections of keys, each with its type, range, default and help text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tlt.base.config.algorithm import AlgorithmSection
from tlt.base.config.drafter import DrafterSection
from tlt.base.config.engine import DecoderSection, DeviceSection
from tlt.base.config.environment import EnvironmentSection
from tlt.base.config.lora import LoraSection
from tlt.base.config.mistakes import mistake, validate
from tlt.base.config.rewards import RewardsSection
from tlt.base.config.rollout import RolloutSection
from tlt.base.config.sampling import SamplingSection
from tlt.base.config.section import AnyPath, Day, Section, split_words
from tlt.base.config.vllm import VllmSection
from tlt.base.speculation import Fixed
from tlt.base.types import UserError
from tlt.base.value_types import (
    Epsilon,
    KeptGib,
    LearningRate,
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

_DEFAULT_NUM_PROBLEMS = 4096
DEFAULT_OUT_DIR = Path("runs/run")


class RunSection(DeviceSection):
    """The run: its folder, its length, its ranks and their device."""

    out_dir: AnyPath = DEFAULT_OUT_DIR
    """Folder of everything the run writes; relative to the working directory."""
    seed: Seed = 0
    """Seed of sampling, problem order and generated problems: the same seed gives the same run."""
    num_steps: NonNegativeInt = 100
    """Policy steps of the run; each generates responses, then updates the policy. 0: the run only
    evaluates."""
    num_ranks: Processes | Literal["auto"] = "auto"
    """Processes that train, on all machines. auto: one for each GPU that run.device allows; on CPUs as many
    as the cores carry at threads_per_rank and the memory at the model's size, at most one for each problem
    of a step. Under torchrun or srun the number of processes that they have started counts."""
    launcher: Literal["local", "ray"] = "local"
    """What starts the ranks: this process, on this machine (local), or an existing Ray cluster (ray). Not
    used under torchrun and srun, which start them."""
    max_restarts: NonNegativeInt = 3
    """Times that all ranks are started again from the last checkpoint and journal after one has failed;
    torchrun counts its own restarts instead."""
    timeout_seconds: Annotated[Seconds, Field(ge=1)] = 600.0
    """Seconds for which a rank waits for another, in a collective or for a sign of life, before it gives
    up and all ranks are started again."""
    threads_per_rank: Threads = 1
    """CPU threads of each rank."""
    equal_rows: bool = False
    """Whether a token's numbers depend on its own row alone: not on how many rows are computed with it, nor
    on whether they are prompt, decoding or verification. Then speculation changes no token in bfloat16
    either. On CPUs the update takes the engine's numbers and routes; on GPUs slower kernels compute the
    engine's, and the update computes its own."""
    checkpoint_every: NonNegativeInt = 10
    """Policy steps between checkpoints; 0: only at the end."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints that stay in the run's folder; older ones are removed when a new one is
    complete."""
    keep_responses: KeptGib = 1.0
    """GiB for the responses of steps and evaluations with their rewards, as JSON lines in the folder
    responses: those of the oldest steps are removed where there are more. 0: none are kept. tlt report
    reads them."""
    show_samples: NonNegativeInt = 0
    """Responses of each step to show: prompt, text and reward, in a line each on the screen, and whole in the
    tables of trackers that have tables (docs/tracking.md)."""
    time_limit_minutes: PositiveFloat | None = None
    """Time limit of the run in minutes: a step begins only if it, as long as the one before, and the last
    evaluation would end in time; None: no limit."""

    @field_validator("num_ranks", mode="before")
    @classmethod
    def _is_auto_or_a_number(cls, value: Any) -> Any:
        if value != "auto" and type(value) is not int:
            raise mistake("it must be auto, or a number of 1 or more")
        return value


class ParallelSection(Section):
    """How the policy's weights, gradients and optimizer lie on the ranks, and the number type of the update
    (docs/parallel.md)."""

    policy: Literal["auto", "replicate", "fsdp"] = "auto"
    """Whether every rank holds the whole policy with gradients and optimizer (replicate) or a slice of them
    (fsdp); auto: fsdp where several ranks have GPUs, else replicate."""
    param_dtype: Literal["float32", "float64", "bfloat16"] | None = None
    """Number type that the update of a sharded policy computes in, such as bfloat16; weights, gradients and
    optimizer stay in float32. None: the type of the weights."""
    checkpoint_activations: bool = False
    """Whether the update keeps only each layer's input and computes the layer once more in the backward
    pass: a third more time, and far less memory for long responses."""
    reduce_each_micro_batch: bool = True
    """Whether a sharded policy's gradients are summed over the ranks after every micro-batch. If false, they
    are summed once per optimizer step: less traffic, but every rank then holds the gradients of the whole
    policy."""


class ModelSection(DecoderSection):
    """The policy to start from. --model.chat_template_kwargs.KEY VALUE sets a variable of the tokenizer's
    chat template, such as enable_thinking; --model.chat_template_kwargs {} removes all that the file sets."""

    path: AnyPath
    """The model to train: a Hugging Face checkpoint folder (config.json, tokenizer, safetensors), or
    OWNER/NAME or OWNER/NAME@REVISION on the hub. A run records the commit that it finds first and stays with
    it."""
    adapter: AnyPath | None = None
    """LoRA adapter to start from: a folder as PEFT saves it, or OWNER/NAME on the hub. It is merged into the
    model; where [lora] is used, it is trained on instead, and [lora] must describe it."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables for the tokenizer's chat template."""


class TaskSection(Section):
    """The task, its training problems, and how prompts are written (docs/data.md). --task.options.KEY
    VALUE sets an option of the task's own; --task.options {} removes all that the file sets."""

    name: Annotated[str, Field(min_length=1)] = "data"
    """A task that comes with TLT, such as countdown, or your own as package.module:object or FILE.py:object
    (docs/tasks.md).
    data: the rows of task.data, scored by rewards.functions alone."""
    options: dict[str, Any] = Field(default={})
    """The task's own options, which its problems() takes as keyword arguments."""
    num_problems: Problems | None = None
    """Number of training problems that the task makes, shuffled anew in each epoch; None: 4096, or the
    rows of task.data."""
    data: AnyPath | None = None
    """Training problems to read instead: a JSONL or Parquet file, a folder of them or of save_to_disk, or a
    dataset of the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION."""
    subset: str | None = None
    """Configuration of the dataset, such as "main"; None: its default."""
    split: str | None = None
    """Split of the dataset, such as "train" or "train[:1000]"; None: the only one, else train."""
    columns: dict[str, str] = Field(default={})
    """The dataset's names of columns by TLT's: {prompt = "question"}. Other columns keep their names."""
    chat: bool = False
    """Whether a text prompt goes into the tokenizer's chat template, as the user's message; messages
    always do."""
    system_prompt: str | None = None
    """System message to begin every prompt with; text prompts then become the user's message."""
    max_prompt_tokens: PositiveInt | None = None
    """Length of the longest prompt, in tokens: problems with a longer one are left out, and counted. None:
    none are, and a prompt that the model's window does not hold is refused."""
    date: Day | None = None
    """Date that the chat template writes, where it writes one (Llama 3.2, gpt-oss, Granite), such as
    2026-11-26; None: the day on which the run begins. A resumed run keeps it."""

    @model_validator(mode="before")
    @classmethod
    def _one_source_of_problems(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if values.get("data") is not None:
            if values.get("num_problems") is not None:
                raise mistake("data and num_problems exclude each other: remove one")
            return values
        for key in ("subset", "split", "columns"):
            if values.get(key):
                raise mistake(
                    f"{key} is set but data, which it belongs to, is not: set data, or remove {key}"
                )
        is_given = values.get("num_problems") is not None  # which may be 0, and refused
        return values if is_given else {**values, "num_problems": _DEFAULT_NUM_PROBLEMS}


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
    """Policy steps in which the policy's learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The policy's learning rate after the warm-up: constant, or falling to 0 at run.num_steps."""
    clip_grad_norm: PositiveFloat = 1.0
    """Largest gradient norm of the policy."""

    @property
    def depends_on_num_steps(self) -> bool:
        return self.schedule != "constant"


class EvaluationSection(Section):
    """The evaluation: held-out problems, the same every time. They are the test problems that the task makes,
    or the first rows of evaluation.data or of another split of task.data."""

    every: NonNegativeInt = 0
    """Policy steps between evaluations; 0: only before the first step and after the last."""
    num_problems: Annotated[int, Field(ge=0, le=2**24)] = 64
    """Held-out problems of an evaluation; 0: no evaluation."""
    data: AnyPath | None = None
    """Held-out problems: a file, folder or dataset as for task.data; None: task.data if evaluation.split is
    set, else the task's test problems."""
    subset: str | None = None
    """Configuration of the dataset of held-out problems; None: its default, and for task.data task.subset."""
    split: str | None = None
    """Split of the dataset of held-out problems; None: the only one, else test."""
    columns: dict[str, str] | None = None
    """That dataset's names of columns by TLT's; None: as in task.columns."""
    samples_per_problem: Samples = 4
    """Responses to each held-out problem; at temperature 0, where all are equal, one is drawn."""
    temperature: Temperature = 1.0
    """Sampling temperature of evaluations; at 0 the most probable token is taken."""

    @property
    def num_samples(self) -> int:
        return self.samples_per_problem if self.temperature else 1


class TrackingSection(Section):
    """Trackers, which get the figures of metrics.jsonl (docs/tracking.md). A tracker that fails does not stop
    the run."""

    use: Annotated[list[str], BeforeValidator(split_words)] = Field(default=[])
    """Any of wandb, tensorboard, trackio, mlflow, swanlab, comet_ml, aim, clearml and dvclive, or your own as
    "package.module:Class" or "FILE.py:Class"; on the command line with commas between."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """The tracker's project for the run; None: WANDB_PROJECT, else tlt."""
    run_name: Annotated[str, Field(min_length=1)] | None = None
    """The run's name in the tracker; None: that of the folder run.out_dir."""


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
    environment: EnvironmentSection = EnvironmentSection()
    rewards: RewardsSection = RewardsSection()
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        if told := next(self._contradictions(), None):
            raise mistake(told)
        return self

    def _contradictions(self) -> Iterator[str]:
        rollout, task, evaluation = self.rollout, self.task, self.evaluation
        has_drafter, speculation = self.drafter.path is not None, rollout.speculation
        if self.drafter.train and not has_drafter:
            what = "drafter.train is true but drafter.path is not set"
            yield f"{what}: give a drafter folder, or set it to false"
        if isinstance(speculation, Fixed):
            kind = speculation.drafted_by("learned" if has_drafter else "ngram").drafter
            other = kind.removeprefix("ahead+")
            if other not in ("learned", "ngram", "hybrid", "ahead"):
                what = f"rollout.speculation names the drafter {kind!r}"
                yield f"{what}: give learned, ngram, hybrid or ahead"
            if other in ("learned", "hybrid") and not has_drafter:
                what = f"rollout.speculation is {str(speculation)!r} but drafter.path is not set"
                yield f"{what}: give a drafter folder, or use ngram, which needs none"
        if rollout.ahead and not rollout.uses_references:
            what = f"rollout.ahead is {rollout.ahead}, but nothing would draft from what is generated"
            needs = "engine tlt, speculation adaptive and tuner cost-model"
            yield f"{what}: leave it out, or give {needs}"
        if rollout.router_replay and rollout.engine == "vllm":
            what = "rollout.router_replay is true, but engine vllm tells no routes"
            yield f"{what}: set it to false, or rollout.engine to tlt"
        if task.data is None and evaluation.data is None and (evaluation.split or evaluation.subset):
            what = "evaluation.split and evaluation.subset need data"
            yield f"{what}: set evaluation.data or task.data, or remove them"
        for key in ("subset", "columns"):
            if getattr(evaluation, key) is not None and evaluation.data is None and evaluation.split is None:
                what = f"evaluation.{key} is set, but neither evaluation.data nor evaluation.split"
                yield f"{what}: give one of these, or remove it"
        may_give = self.environment.has_factory  # get_reward()
        scores_nothing = {"data": "'data' (the default)", "seeds": "'seeds'"}.get(task.name)
        if scores_nothing and not set(self.rewards.functions) - {"task"} and not may_give:
            what = f"task.name is {scores_nothing}, which scores nothing"
            yield f"{what}: give a task.name, rewards.functions, or environment.factory"
        if not self.run.num_steps and not evaluation.num_problems:
            what = "run.num_steps and evaluation.num_problems are both 0: nothing would be done"
            yield f"{what}; raise one of them"
        if task.num_problems is not None and task.num_problems < rollout.problems_per_step:
            what = f"rollout.problems_per_step is {rollout.problems_per_step} but task.num_problems only"
            remedy = "a step would repeat a problem; raise the second or lower the first"
            yield f"{what} {task.num_problems}: {remedy}"
        num_responses = rollout.problems_per_step * rollout.samples_per_problem
        if self.algorithm.minibatches > num_responses:
            what = f"algorithm.minibatches is {self.algorithm.minibatches}"
            yield f"{what} but a step has only {num_responses} responses: lower it"
        buffer, limit = self.algorithm.overlong_buffer_tokens or 0, self.sampling.max_tokens
        if buffer > limit:
            what = f"algorithm.overlong_buffer_tokens is {buffer}"
            yield f"{what} but sampling.max_tokens only {limit}: lower it"

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_json(text: str, place: str = "config.json") -> Config:
        """Raises UserError for text that `to_json` has not written."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not JSON: {error}; restore the file the run wrote") from None
        return validate(Config, values, place)

"""TRL's GRPOTrainer generates with our engine: `GRPOTrainer(..., rollout_func=TLTRollout(drafter=...))`.

    GRPOTrainer ── prompts of this process, one per completion ──▶ TLTRollout ──▶ LiveRollouts (all processes)
        ▲                                                             │
        └── prompt_ids, completion_ids, logprobs, in their order ─────┘

rollout_func is experimental: TRL's version is pinned, and tests check the internals used here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback

from tlt.apps.integrations.trl_turns import TRLTurns
from tlt.base.io.extras import how_to_install, version_of
from tlt.base.spans import SpanName
from tlt.base.types import Purpose, SamplingParams, UserError
from tlt.training.live import LiveRollouts, LiveSettings

TRL_VERSION = "1.16"

LAW = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SAMPLING = {**LAW, "max_new_tokens": 0, "do_sample": True}
"""transformers' generation settings that TLT has, too → the meaning of None."""

NEUTRAL = {"repetition_penalty": 1.0, "num_beams": 1, "num_return_sequences": 1, "length_penalty": 1.0}
"""Settings that would change the sampling law → their neutral value."""

HARMLESS = ("use_cache", "cache_implementation", "disable_compile", "pad_token_id", "bos_token_id")

DRAFTER_FOLDER = "drafter"

log = logging.getLogger(__name__)


class _Attached:
    def __init__(self) -> None:
        self.trainer: Any = None
        self.rollouts: LiveRollouts | None = None
        self.turns: TRLTurns | None = None

    def rollouts_of(self, trainer: Any, settings: LiveSettings) -> LiveRollouts:
        if self.rollouts is None or self.trainer is not trainer:
            check_trainer(trainer)
            model = trainer.accelerator.unwrap_model(trainer.model)
            turns = TRLTurns(trainer) if trainer.tools else None
            rollouts = LiveRollouts(model, resumed(settings, trainer), turns)
            if turns is not None:
                trainer._tool_call_loop = turns.tool_call_loop
            trainer.add_callback(Keeper(rollouts))
            self.trainer, self.rollouts, self.turns = trainer, rollouts, turns
        return self.rollouts


@dataclass(frozen=True)
class TLTRollout(LiveSettings):
    """A rollout function for TRL's GRPOTrainer. Temperature, lengths and the like are the trainer's
    (GRPOConfig).

    A response's key is (args.seed, training or evaluation, global step, prompt, its earlier occurrences in
    the step). So a resumed run draws the tokens of an uninterrupted run, with any drafter.
    """

    _attached: _Attached = field(default_factory=_Attached, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_version()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL calls it on every process, with a prompt for each of the process's completions."""
        rollouts, turns = self._attached.rollouts_of(trainer, self), self._attached.turns
        check_prompts(prompts, trainer)
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        purpose: Purpose = "rollout" if trainer.model.training else "evaluation"
        states = () if turns is None else turns.instances.states()
        generated = rollouts.generate(
            prompt_ids, sampling_params(trainer), trainer.state.global_step, purpose, states
        )
        for name, value in metrics(rollouts).items():
            trainer._log_metric(f"tlt/{name}", value)
        ends = [None] * len(generated) if turns is None else turns.note(generated)
        pairs = [*zip(generated, ends, strict=True)]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(rollout.token_ids[:end]) for rollout, end in pairs],
            "logprobs": [list(rollout.logprobs[:end]) for rollout, end in pairs],
        }

    @property
    def rollouts(self) -> LiveRollouts | None:
        return self._attached.rollouts


class Keeper(TrainerCallback):
    """Saves the drafter in TRL's checkpoints, and makes a repeated evaluation draw the same responses."""

    def __init__(self, rollouts: LiveRollouts) -> None:
        self.rollouts = rollouts

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.rollouts.save_drafter(checkpoint_folder(args, state) / DRAFTER_FOLDER)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rollouts.restart("evaluation")


def checkpoint_folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def resumed(settings: LiveSettings, trainer: Any) -> LiveSettings:
    """Takes the drafter of the checkpoint that the trainer resumes from."""
    folder = checkpoint_folder(trainer.args, trainer.state) / DRAFTER_FOLDER
    if settings.drafter is None or trainer.state.global_step == 0:
        return settings
    if not folder.is_dir():
        log.warning("%s does not exist, so the drafter begins anew from %s", folder, settings.drafter)
        return settings
    log.info("the drafter goes on from %s", folder)
    return replace(settings, drafter=folder)


# ── what TRL says ───────────────────────────────────────────────────────────────────────────────────────────


def check_version() -> None:
    if (found := version_of("trl")) is None:
        raise UserError(f"trl: is not installed; {how_to_install('trl')}")
    if found.split(".")[:2] != TRL_VERSION.split("."):
        differs = f"{found} is installed, but rollout_func may differ from {TRL_VERSION}'s"
        raise UserError(f"trl: {differs}; {how_to_install('trl')}")


def check_trainer(trainer: Any) -> None:
    if trainer.use_vllm:
        raise UserError("use_vllm: is True, but completions come from TLT's engine; set it to False")
    if not isinstance(trainer.processing_class, PreTrainedTokenizerBase):
        reads = f"a {type(trainer.processing_class).__name__} reads more than text"
        raise UserError(f"processing_class: {reads}, which is not supported; use a text model")


def sampling_params(trainer: Any) -> SamplingParams:
    """generation_kwargs go before the trainer's arguments. Raises UserError where transformers would sample
    by another law."""
    args = trainer.args
    given = {name: getattr(args, name) for name in (*LAW, "repetition_penalty")}
    given |= {"max_new_tokens": args.max_completion_length, **(args.generation_kwargs or {})}
    for name, value in given.items():
        if name in SAMPLING or name in HARMLESS or value is None or value == NEUTRAL.get(name):
            continue
        remedy = f"set it to {NEUTRAL[name]}" if name in NEUTRAL else "remove it"
        raise UserError(f"{name}: is {value!r}, which is not supported in rollouts of TLT; {remedy}")
    law: dict[str, Any] = {
        name: default if given.get(name) is None else given[name] for name, default in SAMPLING.items()
    }
    return SamplingParams(
        temperature=law["temperature"] if law["do_sample"] else 0.0,
        top_k=law["top_k"],
        top_p=law["top_p"],
        min_p=law["min_p"],
        max_tokens=law["max_new_tokens"],
        stop_ids=tuple(trainer.eos_token_ids),
        seed=args.seed,
    )


def check_prompts(prompts: Sequence[Any], trainer: Any) -> None:
    from trl import is_conversational

    if trainer.tools and not is_conversational({"prompt": prompts[0]}):
        raise UserError("tools: are called in conversations, but prompt is text; give prompts as messages")


# ── what TRL logs ───────────────────────────────────────────────────────────────────────────────────────────


def metrics(rollouts: LiveRollouts) -> Mapping[str, float]:
    """rollout_seconds, tokens_per_second: of all processes together.
    idle_seconds: up to the last token of all, summed over processes.
    drafter_seconds: of training the drafter; TRL logs the mean over processes.
    drafter_acceptance: sum_v min(p, q) per token, after training.
    """
    result = rollouts.latest
    assert result is not None, "something has been generated"
    measured = {
        "rollout_seconds": result.seconds,
        "tokens_per_second": result.stats.num_tokens / result.seconds,
        "idle_seconds": result.idle_seconds,
        "drafter_seconds": rollouts.seconds.get(SpanName.TRAIN_DRAFTER, 0.0),
    }
    if result.check is not None:
        measured["drafter_acceptance"] = result.check.acceptance
    return {**result.stats.draft_metrics, **measured}

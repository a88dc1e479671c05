"""One arm of benchmarks/trl.py, on one rank: `torchrun --module benchmarks.trl_worker JOB`. Writes what it
measured as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.trl import Job
from tlt.base.config.load import load_config
from tlt.base.types import Problem, SamplingParams
from tlt.engine.build.engine import build_engine, load_stored_drafter
from tlt.engine.build.model import load_model
from tlt.tasks.countdown import TASK
from tlt.tasks.rewards.pool import RewardPool
from tlt.tasks.rewards.scoring import RewardSpec
from tlt.training.build.policy import build_policy_trainer
from tlt.training.build.run_engine import engine_settings
from tlt.training.build.watched_drafter import watch_drafter
from tlt.training.live import prompt_name
from tlt.training.ranks.world import gather_objects, init_process_group_from_env, join_process_group
from tlt.training.report.timeline import Timeline
from tlt.training.rollout.phase import RolloutPhase
from tlt.training.rollout.protocol import Sinks
from tlt.training.rollout.work_queue import connect_work_queue

RECIPE = Path(__file__).parents[1] / "recipes" / "countdown"
GROUP = 8
NO_LEARNING = 1e-20
"""A learning rate that changes no weight in float32."""

Lengths = dict[str, list[int]]
"""By "step/prompt", the lengths of the responses to it."""


class StopAtLengths:
    """Ends row b after `lengths_B[b]` tokens; `generate` continues until all rows have ended."""

    eos_token_id: int | None = None
    """`generate` pads ended rows only if some criterion has an attribute of this name."""

    def __init__(self, prompt_length: int, lengths_B: torch.Tensor) -> None:
        self.end_B = prompt_length + lengths_B

    def __call__(self, token_ids_BT: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return token_ids_BT.shape[1] >= self.end_B


def problems_of(job: Job) -> list[dict[str, Any]]:
    """Returns the problems of all steps, in order; prompts of one step are different ones."""
    return TASK.problems(job.responses // GROUP * job.steps, seed=5, mix={3: 1.0}, max_number=15)


class Clock:
    """Measures steps and the rollouts within them."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self.rollout_seconds: list[float] = []
        self.num_tokens: list[int] = []

    def timed(self, seconds: list[float], function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds.append(time.perf_counter() - start)
            return result

        return call


# ── TRL ─────────────────────────────────────────────────────────────────────────────────────────────────────


def solves(completions: list[str], numbers: list[Any], target: list[Any], **_: Any) -> list[float]:
    puzzles = [{"numbers": n, "target": t} for n, t in zip(numbers, target, strict=True)]
    return [TASK.score(puzzle, text)["reward"] for puzzle, text in zip(puzzles, completions, strict=True)]


def run_trl(job: Job, clock: Clock) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tlt.apps.integrations.trl import TLTRollout

    ranks = int(os.environ["WORLD_SIZE"])
    seen: Lengths = {}

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.step_seconds.append(time.perf_counter() - self.start)

    def rollout(prompts: list[Any], trainer: Any) -> Any:
        output = ours(prompts, trainer)
        for ids, completion in zip(output["prompt_ids"], output["completion_ids"], strict=True):
            seen.setdefault(f"{trainer.state.global_step}/{prompt_name(ids)}", []).append(len(completion))
        return output

    ours = clock.timed(
        clock.rollout_seconds,
        TLTRollout(RECIPE / "drafter", drafting={"learning_rate": 1e-4}),
    )
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            # of 32 responses of 1,024 tokens at once, an update takes 12 GB a rank
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=job.responses // ranks // GROUP,
            num_generations=GROUP,
            max_completion_length=job.max_tokens,
            max_steps=job.steps,
            learning_rate=NO_LEARNING,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
        )
        trainer = GRPOTrainer(
            model=str(RECIPE / "base"),
            reward_funcs=solves,
            args=config,
            train_dataset=Dataset.from_list(problems_of(job)),
            callbacks=[Steps()],
            rollout_func=rollout if job.arm == "trl-tlt" else None,
        )
        if job.arm == "trl":
            forced = force_lengths(trainer, json.loads(Path(job.lengths).read_text()))
            trainer.model.generate = clock.timed(clock.rollout_seconds, forced)
        trainer.train()
        for entry in [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]:
            clock.num_tokens.append(round(entry["completions/mean_length"] * job.responses))
    world = join_process_group(torch.device("cpu"))
    gathered = gather_objects(world, seen)
    if world.is_leader and job.arm == "trl-tlt":
        Path(job.lengths).write_text(
            json.dumps({key: value for lengths in gathered for key, value in lengths.items()})
        )


def force_lengths(trainer: Any, lengths: Lengths) -> Any:
    """Returns `model.generate` with responses of given lengths: no end of sequence before the last token,
    which is one. Those of the largest length are cut off there, as they were."""
    from transformers import StoppingCriteriaList

    generate, stop_id, longest = (
        trainer.model.generate,
        trainer.eos_token_ids[0],
        trainer.max_completion_length,
    )
    pad_id = trainer.processing_class.pad_token_id

    def forced(
        input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: Any, **kwargs: Any
    ) -> torch.Tensor:
        come: Counter[str] = Counter()
        wanted = []
        for row, mask in zip(input_ids, attention_mask, strict=True):
            name = f"{trainer.state.global_step}/{prompt_name(row[mask.bool()].tolist())}"
            wanted.append(lengths[name][come[name]])
            come[name] += 1
        width = input_ids.shape[1]
        criteria: Any = StopAtLengths(width, torch.tensor(wanted))
        generation_config.eos_token_id, generation_config.suppress_tokens = None, [stop_id, pad_id]
        tokens_BT: torch.Tensor = generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            stopping_criteria=StoppingCriteriaList([criteria]),
            **kwargs,
        )
        for row, length in enumerate(wanted):
            if length < longest:
                tokens_BT[row, width + length - 1] = stop_id
        return tokens_BT

    return forced


# ── TLT ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run_tlt(job: Job, clock: Clock) -> None:
    changes = {
        "optimizer.learning_rate": NO_LEARNING,
        "sampling.max_tokens": job.max_tokens,
    }
    config = load_config("countdown", changes)
    world = init_process_group_from_env("cpu")
    model = load_model(config.model.path, torch.float32)
    assert model.tokenizer is not None
    trainer = build_policy_trainer(config, model, world)
    timeline, stored = Timeline(world.rank), load_stored_drafter(config.drafter.path, model)
    engine = build_engine(
        model.config, model.tensors, engine_settings(config, "cpu"), stored, on_span=timeline.add
    )
    training = watch_drafter(config.drafter, stored, engine, world, timeline, seed=0)
    queue = connect_work_queue(world.store, world.rank, world.world_size, timeout=600.0)
    params = SamplingParams(max_tokens=job.max_tokens, stop_ids=model.stop_ids, seed=42)  # TRL's default seed
    with RewardPool(RewardSpec("countdown"), 1, 5.0) as scorers:
        sinks = Sinks(scorers, model.tokenizer.decode)
        phase = RolloutPhase(world, engine, queue, sinks, timeline, lambda: False)
        generate = clock.timed(clock.rollout_seconds, phase.run)
        num = job.responses // GROUP

        def take_step(step: int) -> None:
            records = problems_of(job)[step * num : (step + 1) * num]
            ids = [model.tokenizer.encode_text(record["prompt"], "prompt") for record in records]  # type: ignore[union-attr]  # asserted
            problems = [Problem(prompt_name(i), i, record) for i, record in zip(ids, records, strict=True)]
            result = generate(problems, GROUP, params, "rollout", step, training)
            trainer.update(result.rollouts, result.rewards, step)
            engine.load_policy(dict(trainer.model.named_parameters()), step + 1)
            clock.num_tokens.append(sum(len(rollout.token_ids) for rollout in result.rollouts))

        timed = clock.timed(clock.step_seconds, take_step)
        for step in range(job.steps):
            timed(step)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    clock = Clock()
    (run_tlt if job.arm == "tlt" else run_trl)(job, clock)
    gathered = gather_objects(world := join_process_group(torch.device("cpu")), clock.rollout_seconds)
    clock.rollout_seconds = [
        max(seconds) for seconds in zip(*gathered, strict=True)
    ]  # TRL's ranks end at different times
    if world.is_leader:
        Path(job.out).write_text(json.dumps(vars(clock)))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One arm of benchmarks/trl.py, on one rank: `torchrun --module benchmarks.trl_worker JOB`. Writes what it
measured as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.trl import Job
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.types import Problem, Rollout, num_drawn
from tlt.engine.build.engine import build_engine, load_stored_drafter
from tlt.engine.build.model import load_model
from tlt.tasks.base import get_task
from tlt.tasks.environments.environment import Environments
from tlt.tasks.rewards.pool import RewardPool
from tlt.training.build.environment import build_between_turns, environment_spec
from tlt.training.build.models import build_drafter_training
from tlt.training.build.policy import build_policy_trainer, reward_spec
from tlt.training.build.problems import chat_format, load_problems
from tlt.training.build.run_engine import engine_settings
from tlt.training.idle.work import IdleWork
from tlt.training.live import prompt_name
from tlt.training.ranks.world import gather_objects, init_process_group_from_env, join_process_group
from tlt.training.report.timeline import Timeline
from tlt.training.rollout.phase import RolloutPhase
from tlt.training.rollout.protocol import Sinks
from tlt.training.rollout.work_queue import connect_work_queue

NO_LEARNING = 1e-20
"""A learning rate that changes no weight in float32."""

PRODUCTS = Path(__file__).with_name("products.toml")

Response = tuple[list[int], list[int], list[tuple[int, int]]]
"""Token ids of the prompt and of the response, and where in the response its environment spoke (`Turns.given`)."""


class Forced:
    """Leaves one token possible: of row b at place t `wanted_BT[b][t]`, after them `stop_id`."""

    def __init__(self, prompt_length: int, wanted_BT: Sequence[Sequence[int]], stop_id: int) -> None:
        self.prompt_length, self.wanted_BT, self.stop_id = prompt_length, wanted_BT, stop_id

    def __call__(self, token_ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        place = token_ids_BT.shape[1] - self.prompt_length
        tokens = [wanted[place] if place < len(wanted) else self.stop_id for wanted in self.wanted_BT]
        kept_B1 = torch.tensor(tokens)[:, None]
        return torch.full_like(scores_BV, -math.inf).scatter_(1, kept_B1, scores_BV.gather(1, kept_B1))


def config_of(job: Job) -> Config:
    changes = {"task.num_problems": job.responses // job.group * job.steps, "run.seed": 5}
    if job.products is None:
        options = {"task.options": {"mix": {3: 1.0}, "max_number": 15}}
        return load_config("countdown", {**changes, **options, **own_changes(job)})
    folder = Path(job.products)
    models = {"model.path": str(folder / "base"), "drafter.path": str(folder / "drafter")}
    return load_config(PRODUCTS, {**changes, **models, **own_changes(job)})


def own_changes(job: Job) -> dict[str, Any]:
    return {"optimizer.learning_rate": NO_LEARNING, "sampling.max_tokens": job.max_tokens}


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


def run_trl(job: Job, clock: Clock) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tlt.apps.integrations.trl import TLTRollout

    ranks, config = int(os.environ["WORLD_SIZE"]), config_of(job)
    environments = Environments(environment_spec(config.environment))
    task = get_task(config.task.name)
    seen: list[list[Response]] = []

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.step_seconds.append(time.perf_counter() - self.start)

    drafting = {"learning_rate": 1e-4, "vocabulary": config.drafter.vocabulary}
    generate = TLTRollout(config.drafter.path, drafting=drafting)

    def rollout(prompts: list[Any], trainer: Any) -> Any:
        output = generate(prompts, trainer)
        live: Any = generate.rollouts
        seen.append(recorded(live.latest.rollouts))
        return output

    def scored(prompts: Any, completions: list[Any], row: list[str], **_: Any) -> list[float]:
        texts = [said if isinstance(said, str) else str(said[-1]["content"]) for said in completions]
        return [task.score(json.loads(r), text)["reward"] for r, text in zip(row, texts, strict=True)]

    rows = [problem.data for problem in load_problems(config, "train")]
    # of an update: 4 responses of 600 tokens take SmolLM2 10 GB a rank, 32 of 1,024 take Countdown's model 12
    at_once = job.group if job.products is None else job.group // 2
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=job.responses // ranks // at_once,
            num_generations=job.group,
            max_completion_length=job.max_tokens,
            max_tool_calling_iterations=config.environment.max_turns - 1,
            temperature=config.sampling.temperature,
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
            model=str(config.model.path),
            reward_funcs=scored,
            args=settings,
            train_dataset=Dataset.from_list(
                [{"prompt": row.get("messages") or row["prompt"], "row": json.dumps(row)} for row in rows]
            ),
            callbacks=[Steps()],
            tools=[*environments.tools.values()] or None,
            rollout_func=rollout if job.arm == "trl-tlt" else None,
        )
        if job.arm == "trl":
            trainer.model.generate = force_tokens(trainer, json.loads(Path(job.tokens).read_text()))
        trainer._generate = clock.timed(clock.rollout_seconds, trainer._generate)
        trainer.train()
        for entry in [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]:
            clock.num_tokens.append(round(entry["completions/mean_length"] * job.responses))
    if job.arm == "trl-tlt" and os.environ["RANK"] == "0":
        Path(job.tokens).write_text(json.dumps(seen))


def recorded(rollouts: Sequence[Rollout]) -> list[Response]:
    return [([*r.prompt_ids], [*r.token_ids], [*(r.turns.given if r.turns else ())]) for r in rollouts]


def force_tokens(trainer: Any, steps: Sequence[Sequence[Response]]) -> Any:
    """Returns `model.generate` that samples the tokens of given responses, by step. A row that none of them begins
    with ends at once."""
    from transformers import LogitsProcessorList

    generate, stop_id = trainer.model.generate, trainer.eos_token_ids[0]

    def forced(input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        left = [*steps[trainer.state.global_step]]
        rows = zip(input_ids, attention_mask, strict=True)
        wanted = [next_turn(row[mask.bool()].tolist(), left) for row, mask in rows]
        processors: Any = LogitsProcessorList([Forced(input_ids.shape[1], wanted, stop_id)])
        tokens_BT: torch.Tensor = generate(
            input_ids=input_ids, attention_mask=attention_mask, logits_processor=processors, **kwargs
        )
        return tokens_BT

    return forced


def next_turn(begun: list[int], left: list[Response]) -> list[int]:
    """Returns the turn after these tokens of a response, which leaves the list."""
    for response in left:
        prompt, tokens, given = response
        starts, ends = [0, *(end for _, end in given)], [*(first for first, _ in given), None]
        for start, end in zip(starts, ends, strict=True):
            if [*prompt, *tokens[:start]] == begun:
                left.remove(response)
                return tokens[start:end]
    return []


# ── TLT ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run_tlt(job: Job, clock: Clock) -> None:
    config = config_of(job)
    world = init_process_group_from_env("cpu")
    model = load_model(config.model.path, torch.float32)
    assert model.tokenizer is not None
    trainer = build_policy_trainer(config, model, world)
    timeline, stored = Timeline(world.rank), load_stored_drafter(config.drafter.path, model)
    engine = build_engine(
        model.config, model.tensors, engine_settings(config, "cpu"), stored, on_span=timeline.add
    )
    training = build_drafter_training(config.drafter, stored, engine, world, timeline, seed=0)
    idle_work = IdleWork(training=training)
    queue = connect_work_queue(world.store, world.rank, world.world_size, timeout=600.0)
    params = config.sampling.params(42, model.stop_ids)  # TRL's default seed
    between_turns = build_between_turns(
        config.environment, model.tokenizer, chat_format(config), model.config.max_positions
    )
    loaded = load_problems(config, "train")
    problems = [Problem(prompt_name(p.prompt_ids), p.prompt_ids, p.data) for p in loaded]
    with RewardPool(reward_spec(config), 1, 5.0) as scorers:
        sinks = Sinks(scorers, model.tokenizer.decode, between_turns=between_turns)
        phase = RolloutPhase(world, engine, queue, sinks, timeline, lambda: False)
        generate = clock.timed(clock.rollout_seconds, phase.run)
        num, seen = job.responses // job.group, list[list[Response]]()

        def take_step(step: int) -> None:
            result = generate(
                problems[step * num : (step + 1) * num], job.group, params, "rollout", step, idle_work
            )
            trainer.update(result.rollouts, result.rewards, step)
            engine.load_policy(dict(trainer.model.named_parameters()), step + 1)
            clock.num_tokens.append(sum(map(num_drawn, result.rollouts)))
            seen.append(recorded(result.rollouts))

        timed = clock.timed(clock.step_seconds, take_step)
        for step in range(job.steps):
            timed(step)
    between_turns.close()
    if world.is_leader and not Path(job.tokens).exists():
        Path(job.tokens).write_text(json.dumps(seen))


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

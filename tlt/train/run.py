"""THE loop: rollout phase → update → publish → record → checkpoint. Everything it drives is made in `Run`.

    for step in steps:      problems ─▶ phase (responses, rewards; idle ranks train the drafter) ─▶ policy update
                               ▲                                                                      │
                               └──────────── publish: the engines load the new policy ◀───────────────┘

The same program runs on every rank; what rank 0 does besides is write files and print.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tlt.build import EngineSettings, build_engine
from tlt.config.schema import Config, DrafterSection
from tlt.distributed.mailbox import connect_mailbox
from tlt.distributed.work_queue import Coordinator, connect_coordinator
from tlt.distributed.world import (
    World,
    any_rank,
    average_weighted,
    choose_device,
    gather_objects,
    init_process_group_from_env,
    shutdown,
)
from tlt.drafter.buffer import TrajectoryBuffer
from tlt.drafter.folder import StoredDrafter, choose_preset, load_drafter, save_drafter
from tlt.drafter.hybrid import HybridDrafter
from tlt.drafter.learned import LearnedDrafter
from tlt.drafter.measure import Subject
from tlt.drafter.model import DraftModel
from tlt.drafter.ngram import count_retrieved
from tlt.drafter.service import DrafterWatch, Ranks
from tlt.drafter.spot import SpotTrainer
from tlt.drafter.trainer import DrafterTrainer
from tlt.files import Record, get_id, read_jsonl
from tlt.models.decoder import Transformer
from tlt.models.hf_config import load_model_config
from tlt.models.hf_weights import content_hash, load_tensors, save_model
from tlt.models.tokenizer import check_prompt, load_tokenizer
from tlt.report.console import Console
from tlt.report.metrics import LengthStats, MetricsWriter, StepRecord, paired_sign_flip_test
from tlt.report.timeline import Timeline, merge_timelines, rank_path, shared_epoch
from tlt.rl.rewards import RewardPool
from tlt.rl.update import PolicyTrainer, UpdateMetrics
from tlt.tasks.base import get_task
from tlt.train.checkpoint import Checkpoint, CheckpointWriter, RunState, latest_checkpoint, load_checkpoint
from tlt.train.phase import DrafterRefresh, PhaseResult, RolloutPhase, StopRequested
from tlt.types import Problem, SamplingParams, SpanName, UserError, resolve_dtype

if TYPE_CHECKING:
    from tlt.distributed.signals import StopRequest


def main(config_json: str, stop: StopRequest) -> None:
    """What every rank runs; `launch` calls it."""
    config = Config.from_json(config_json)
    torch.set_num_threads(config.run.threads_per_rank)
    world = init_process_group_from_env(device_name(config))
    run = Run(config, world, stop)
    try:
        train(run)
    finally:
        run.close()
    del run
    shutdown(world)


def train(run: Run) -> None:
    """From where the last checkpoint left off to the last step, or to the user's stop."""
    try:
        if run.step == 0:
            run.evaluate()
        while run.step < run.config.run.num_steps and not run.is_out_of_time():
            advance(run)
            run.evaluate_if_due()
            run.checkpoint_if_due()
        run.evaluate()
        run.finish()
    except StopRequested as reason:
        run.stop(str(reason))


def advance(run: Run) -> PhaseResult:
    """One step of the loop; `tlt bench train` measures this very function."""
    started = time.perf_counter()
    phase = run.generate()
    update = run.update(phase)
    run.publish(run.step + 1)
    run.record(phase, update, time.perf_counter() - started)
    return phase


def preflight(config: Config) -> None:
    """Everything that can be refused before a process is started: UserError, one line."""
    device_name(config)
    model_config = load_model_config(config.model.path)
    if config.drafter.path is not None:
        stored = load_drafter(config.drafter.path, model_config)
        choose_preset(config.drafter.preset, stored, preset_changes(config.drafter))
    load_problems(config, "train")
    if config.evaluation.num_problems:
        load_problems(config, "test")


class Run:
    """The objects of one run on one rank, and the steps of the loop. `coordinator`: one that runs side by side share;
    `prints`: whether the leader shows the run."""

    def __init__(
        self,
        config: Config,
        world: World,
        stop: StopRequest,
        coordinator: Coordinator | None = None,
        prints: bool = True,
    ) -> None:
        self.config, self.world = config, world
        self.out_dir = config.run.out_dir
        self.step = 0
        self.started = time.perf_counter()
        self.evaluation_seconds = 0.0  # what the latest one took
        self.out_dir.mkdir(parents=True, exist_ok=True)
        if world.is_leader:
            (self.out_dir / "config.json").write_text(config.to_json())
        epoch = shared_epoch(world.rank, lambda value: gather_objects(world, value))
        self.timeline = Timeline(world.rank, rank_path(self.out_dir, world.rank), epoch)
        self.console = Console(enabled=prints and world.is_leader, num_steps=config.run.num_steps)

        self.tokenizer = load_tokenizer(config.model.path)
        self.problems = load_problems(config, "train")
        self.held_out = load_problems(config, "test") if config.evaluation.num_problems else []

        self.model_config = load_model_config(config.model.path)
        dtype = resolve_dtype(config.run.dtype)
        self.master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        initial = load_tensors(config.model.path, self.model_config, self.master_dtype)
        self.policy = self._make_policy(initial)
        reference = self._make_policy(initial) if config.algorithm.kl_coefficient > 0 else None
        self.trainer = PolicyTrainer(
            self.policy,
            config.algorithm,
            config.optimizer,
            temperature=config.sampling.temperature,
            num_steps=config.run.num_steps,
            process_group=world.group,
            reference=reference,
        )
        stored = None if config.drafter.path is None else load_drafter(config.drafter.path, self.model_config, initial)
        settings = EngineSettings.of_run(config, world.device)
        self.engine = build_engine(self.model_config, initial, settings, stored, on_span=self.timeline.add)
        self.learned: LearnedDrafter | None = None
        self.spot: SpotTrainer | None = None
        self.watch: DrafterWatch | None = None
        self.checkpoints = CheckpointWriter(self.out_dir / "checkpoints")
        if stored is not None and self.engine.drafter is not None:
            self._look_after_drafter(stored)
        self._resume()
        self.publish(self.step)
        self.scorers = RewardPool(config.task.name, config.rewards.num_workers, config.rewards.timeout_seconds)
        self.phase = RolloutPhase(
            world,
            self.engine,
            coordinator or connect_coordinator(world.store, world.rank, world.world_size, timeout=600.0),
            self.scorers,
            self.tokenizer.decode,
            self.timeline,
            stop.is_set,
            self.learned,
            self.spot,
            self.watch,
            self._make_refresh(),
            config.rollout.migrate,
        )
        self.metrics = MetricsWriter(self.out_dir / "metrics.jsonl", self.step) if world.is_leader else None

    # ── making ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_policy(self, tensors: dict[str, torch.Tensor]) -> Transformer:
        with torch.device("meta"):
            policy = Transformer(self.model_config)
        policy.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
        return policy.to(self.world.device)

    def _look_after_drafter(self, stored: StoredDrafter) -> None:
        """Makes the copy of the learned drafter that is trained, who trains it, and who watches over it."""
        settings, drafter = self.config.drafter, self.engine.drafter
        assert isinstance(drafter, HybridDrafter), "a learned drafter has retrieval beside it"
        self.learned = drafter.learned
        self.draft_model = DraftModel(stored.config).to(self.world.device)
        self.draft_model.load_state_dict(stored.tensors)
        if settings.train:
            seed = self.config.run.seed * self.world.world_size + self.world.rank  # ranks draw different windows
            preset = choose_preset(settings.preset, stored, preset_changes(settings))
            self.spot = SpotTrainer(
                DrafterTrainer(self.draft_model, self.engine.model, preset, settings.learning_rate, settings.clip_grad_norm),
                TrajectoryBuffer(settings.buffer_mib * 2**20, seed),
                settings.tokens_per_micro_step,
                settings.carry_longest,
                self.timeline.add,
                keeps_captured=settings.features == "captured",
                max_passes=settings.max_passes,
            )
        self.watch = DrafterWatch(
            Subject(self.draft_model, self.learned.model, self.engine.model, count_retrieved),
            self.spot.trainer if self.spot is not None else None,
            self.learned,
            drafter.set_aside,
            Ranks(self.world.rank, partial(gather_objects, self.world), partial(average_weighted, self.world)),
            settings.gate,
            settings.check_every,
        )

    def _make_refresh(self) -> DrafterRefresh | None:
        """None: nobody would publish, or nobody would take it up."""
        settings = self.config.drafter
        if self.learned is None or self.spot is None or self.world.group is None or not settings.refresh_during_rollout:
            return None
        mailbox = connect_mailbox(self.world.store, f"drafter of {self.out_dir}")  # runs side by side share the store
        return DrafterRefresh(mailbox, self.learned, settings.refresh_seconds)

    # ── the steps of the loop ────────────────────────────────────────────────────────────────────────────────────────

    def generate(self) -> PhaseResult:
        """This step's problems, answered and scored."""
        self.cpu_started = time.process_time()
        self.step_started = time.perf_counter()
        problems = problems_of_step(self.problems, self.step, self.config.rollout.problems_per_step, self.config.run.seed)
        return self.phase.run(problems, self.config.rollout.samples_per_problem, self.sampling_params(), "rollout", self.step)

    def update(self, phase: PhaseResult) -> UpdateMetrics:
        with self.timeline.span(SpanName.UPDATE):
            return self.trainer.update(phase.rollouts, phase.rewards, self.step)

    def publish(self, version: int) -> None:
        """The engine gets the policy as it is now; its version is the number of updates behind it."""
        with self.timeline.span(SpanName.PUBLISH):
            self.engine.load_policy(dict(self.policy.named_parameters()), version)

    def record(self, phase: PhaseResult, update: UpdateMetrics, step_seconds: float) -> None:
        """One line of metrics.jsonl and of the table. From here on the step counts as done."""
        self.timeline.record(SpanName.STEP, self.step_started, time.perf_counter())
        cpu_seconds = sum(gather_objects(self.world, time.process_time() - self.cpu_started))
        record = step_record(self.step, phase, update, step_seconds, cpu_seconds)
        if self.metrics is not None:
            self.metrics.write(record)
        self.console.step(record)
        if phase.check is not None and phase.check.has_switched:
            self.console.drafter(self.step + 1, phase.check)
        self.timeline.flush()
        self.step += 1

    def evaluate_if_due(self) -> None:
        every = self.config.evaluation.every
        if every and self.step % every == 0 and self.step < self.config.run.num_steps:
            self.evaluate()

    def evaluate(self) -> None:
        """Solves the held-out problems with the same noise every time, so that two evaluations can be paired."""
        settings = self.config.evaluation
        if not self.held_out or any(e["step"] == self.step for e in self._evaluations()):
            return
        params = dataclasses.replace(self.sampling_params(), temperature=settings.temperature)
        with (
            self.timeline.span(SpanName.EVALUATE),
            self.console.status(f"evaluating on {len(self.held_out)} held-out problems"),
        ):
            phase = self.phase.run(self.held_out, settings.samples_per_problem, params, "evaluation", 0, train_drafter=False)
        self.evaluation_seconds = phase.seconds
        scores: dict[str, list[float]] = {}
        for rollout, reward in zip(phase.rollouts, phase.rewards, strict=True):
            scores.setdefault(rollout.problem_id, []).append(float(reward.is_solved))
        by_problem = {problem: sum(values) / len(values) for problem, values in scores.items()}
        solve_rate = sum(by_problem.values()) / len(by_problem)
        best = max((e["solve_rate"] for e in self._evaluations()), default=-1.0)
        if self.world.is_leader:
            if settings.keep_best and solve_rate > best:
                self._save_policy(self.out_dir / "best")
            line = {"step": self.step, "solve_rate": solve_rate, "seconds": phase.seconds, "by_problem": by_problem}
            with (self.out_dir / "evaluations.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.console.evaluation(self.step, solve_rate, phase.seconds)
        gather_objects(self.world, None)  # nobody reads the file before it is written

    def checkpoint_if_due(self) -> None:
        every = self.config.run.checkpoint_every
        if every and self.step % every == 0 and self.step < self.config.run.num_steps:
            self.checkpoint()

    def is_out_of_time(self) -> bool:
        """Whether another step could make the run, its last evaluation included, exceed its limit."""
        limit = self.config.run.time_limit_minutes
        spent = time.perf_counter() - self.started + self.evaluation_seconds
        return limit is not None and any_rank(self.world, spent > 60 * limit)

    # ── keeping ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def checkpoint(self) -> None:
        """All that the rest of the run depends on. Ranks hold the same state, so one of them writes it."""
        if not self.world.is_leader:
            return
        state = RunState(self.step, self.learned.version if self.learned is not None else 0, self.config.content_hash)
        training: dict[str, Any] = {"policy": self.trainer.state_dict()}
        if self.watch is not None:
            training["watch"] = self.watch.state_dict()
        drafter = None
        if self.spot is not None:
            training["drafter"] = self.spot.state_dict()
            drafter = self._trained_drafter()
        with self.timeline.span(SpanName.CHECKPOINT):
            self.checkpoints.save(Checkpoint(state, self.policy.state_dict(), drafter, training))

    def _trained_drafter(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.draft_model.named_parameters() if tensor.requires_grad}

    def _resume(self) -> None:
        path = latest_checkpoint(self.checkpoints.folder)
        if path is None:
            return
        checkpoint = load_checkpoint(path, self.world.device)
        self.step = checkpoint.state.step
        self.policy.load_state_dict(checkpoint.policy)
        self.trainer.load_state_dict(checkpoint.training["policy"])
        if self.spot is not None:
            assert self.learned is not None, "only a learned drafter is trained"
            restore(self._trained_drafter(), checkpoint.drafter, path)
            self.learned.load(self.draft_model.state_dict(), checkpoint.state.drafter_version)
            self.spot.load_state_dict(checkpoint.training["drafter"])
        if self.watch is not None:
            self.watch.load_state_dict(checkpoint.training["watch"])
        self.console.note(f"resumed at step {self.step} from {path}")

    def finish(self) -> None:
        """The run's products: the policy and the drafter, each in a format that others load, and the picture of the time."""
        self.checkpoint()
        self.checkpoints.wait()
        self.timeline.flush()
        gather_objects(self.world, None)
        if not self.world.is_leader:
            return
        self._save_policy(self.out_dir / "policy")
        products = {"policy": self.out_dir / "policy"}
        if self.learned is not None:
            about: dict[str, Any] = {"policy_hash": content_hash(self.policy.state_dict()), "policy_step": self.step}
            about["drafter_version"] = self.learned.version
            if self.spot is not None:
                about["preset"] = self.spot.trainer.preset.name
            save_drafter(self.out_dir / "drafter", self.draft_model, torch.float32, about)
            products["drafter"] = self.out_dir / "drafter"
        merge_timelines(self.out_dir, self.out_dir / "timeline.json")
        products |= {name: self.out_dir / name for name in ("metrics.jsonl", "config.json", "timeline.json")}
        self.console.summary(products, self._progress(), self.step, time.perf_counter() - self.started)

    def stop(self, reason: str) -> None:
        """The user's stop: the last finished step is kept, the unfinished one will be generated again, token for token."""
        self.checkpoint()
        self.checkpoints.wait()
        gather_objects(self.world, None)
        self.timeline.flush()
        self.console.note(f"stopped {reason}; {self.step} steps are kept. Continue with: tlt train --resume {self.out_dir}")

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        self.scorers.close()
        self.console.close()

    # ── small things ─────────────────────────────────────────────────────────────────────────────────────────────────

    def sampling_params(self) -> SamplingParams:
        s = self.config.sampling
        stop_ids = self.tokenizer.stop_ids
        return SamplingParams(s.temperature, s.top_k, s.top_p, s.min_p, s.max_tokens, stop_ids, self.config.run.seed)

    def _save_policy(self, path: Path) -> None:
        save_model(path, self.model_config, self.policy.state_dict(), dtype=self.master_dtype, source=self.config.model.path)

    def _evaluations(self) -> list[dict[str, Any]]:
        """Evaluations of steps that this run has done, not those of an attempt it has gone back behind."""
        path = self.out_dir / "evaluations.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["step"] <= self.step]

    def _progress(self) -> dict[str, float] | None:
        """Solve rates of the first and the last evaluation and the p value of their paired difference."""
        evaluations = self._evaluations()
        if len(evaluations) < 2:
            return None
        before, after = evaluations[0]["by_problem"], evaluations[-1]["by_problem"]
        problems = sorted(before)
        p_value = paired_sign_flip_test([before[p] for p in problems], [after[p] for p in problems])
        return {"before": evaluations[0]["solve_rate"], "after": evaluations[-1]["solve_rate"], "p_value": p_value}


def restore(trained: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor] | None, path: Path) -> None:
    """A drafter's trained tensors from a checkpoint, exactly these: UserError otherwise. It never goes on from others."""
    found = {} if stored is None else {name: tensor.shape for name, tensor in stored.items()}
    wrong = sorted(found.items() ^ {name: tensor.shape for name, tensor in trained.items()}.items())
    if stored is None or wrong:
        what = "no drafter" if stored is None else f"another drafter ({wrong[0][0]})"
        raise UserError(f"{path}: holds {what}, but this run trains one; start a new run")
    with torch.no_grad():
        for name, tensor in trained.items():
            tensor.copy_(stored[name])


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def device_name(config: Config) -> str:
    """Returns the kind of device that the ranks of this machine compute on. torchrun says how many they are; `tlt train` starts
    all of them here."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", config.run.num_ranks))
    return choose_device(config.run.device, num_ranks, torch.cuda.device_count()).name


def preset_changes(settings: DrafterSection) -> dict[str, Any]:
    """The constants of a preset that the configuration sets."""
    return {
        "unrolled_steps": settings.unrolled_steps,
        "step_decay": settings.step_decay,
        "feature_weight": settings.feature_weight,
        "distribution_weight": settings.distribution_weight,
    }


def load_problems(config: Config, split: str) -> list[Problem]:
    """The task's problems of a split, as tokens; each is checked against the model's window."""
    tokenizer = load_tokenizer(config.model.path)
    window = load_model_config(config.model.path).max_positions
    records = _problem_records(config, split)
    problems = []
    for record in records:
        where = f"task {config.task.name}, problem {record['problem_id']!r}"
        prompt_ids = tokenizer.encode_text(record["prompt"], where)
        check_prompt(prompt_ids, where, vocab_size=tokenizer.vocab_size, window=window)
        problems.append(Problem(record["problem_id"], prompt_ids, record))
    return problems


def _problem_records(config: Config, split: str) -> list[dict[str, Any]]:
    file = config.task.problems_file
    if split == "train" and file is not None:
        return [_checked_problem(place, record) for place, record in read_jsonl(file, "task.problems_file")]
    num = config.task.num_problems if split == "train" else config.evaluation.num_problems
    assert num is not None
    try:
        return get_task(config.task.name).problems(num, config.run.seed, split=split, **config.task.options)
    except (ValueError, TypeError) as error:
        raise UserError(f"task {config.task.name}: {error}; correct [task] in the configuration") from None


def _checked_problem(place: str, record: Record) -> Record:
    get_id(place, record)
    if not isinstance(record.get("prompt"), str):
        raise UserError(f"{place}: prompt is {record.get('prompt')!r}; it must be text, as tlt task writes it")
    return record


def problems_of_step(problems: Sequence[Problem], step: int, num: int, seed: int) -> list[Problem]:
    """Step `step`'s share of an endless sequence of epochs, each shuffled by (seed, epoch). What does not fill a step at
    the end of an epoch waits for the next."""
    steps_per_epoch = len(problems) // num
    epoch, position = divmod(step, steps_per_epoch)
    order = list(range(len(problems)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return [problems[i] for i in order[position * num : (position + 1) * num]]


def step_record(step: int, phase: PhaseResult, update: UpdateMetrics, step_seconds: float, cpu_seconds: float) -> StepRecord:
    """What metrics.jsonl keeps of a step."""
    lengths = [len(rollout.token_ids) for rollout in phase.rollouts]
    stats = phase.stats
    reports = [replica.drafter for replica in phase.replicas]
    trained = [report for report in reports if report.num_tokens]
    nan, check = float("nan"), phase.check
    drafter_tokens = sum(report.num_tokens for report in reports)
    return StepRecord(
        step=step,
        reward_mean=sum(reward.value for reward in phase.rewards) / len(phase.rewards),
        solve_rate=sum(reward.is_solved for reward in phase.rewards) / len(phase.rewards),
        num_responses=len(lengths),
        num_tokens=sum(lengths),
        response_tokens=LengthStats.of(lengths),
        truncated_share=sum(rollout.finish_reason == "length" for rollout in phase.rollouts) / len(lengths),
        zero_variance_groups=update.zero_variance_groups,
        loss=update.loss,
        grad_norm=update.grad_norm,
        entropy=update.entropy,
        clip_fraction=update.clip_fraction,
        kl=update.kl if update.kl is not None else nan,
        lr=update.lr,
        engine_trainer_logprob_gap=update.engine_trainer_logprob_gap,
        rollout_seconds=phase.seconds,
        update_seconds=update.seconds,
        step_seconds=step_seconds,
        cpu_seconds=cpu_seconds,
        idle_seconds=phase.idle_seconds,
        drafter_train_seconds=phase.drafter_seconds,
        harvested_share=phase.drafter_seconds / phase.idle_seconds if phase.idle_seconds > 0 else nan,
        drafter_loss=sum(r.loss * r.num_tokens for r in trained) / drafter_tokens if trained else nan,
        drafter_tokens=drafter_tokens,
        drafter_captured_tokens=sum(report.captured_tokens for report in reports),
        drafter_recomputed_tokens=sum(report.recomputed_tokens for report in reports),
        drafter_refreshes=sum(replica.num_refreshes for replica in phase.replicas),
        num_migrated=sum(replica.num_migrated for replica in phase.replicas),
        preemption_seconds=phase.preemption_seconds,
        accept_length=stats.accept_length if stats.accept_length is not None else nan,
        accept_by_depth=tuple(stats.accept_by_depth),
        strategy_seconds={name: s.seconds for name, s in stats.by_strategy.items()},
        strategy_speed={name: s.speed for name, s in stats.by_strategy.items()},
        strategy_predicted={n: s.predicted_speed for n, s in stats.by_strategy.items() if s.predicted_speed is not None},
        tokens_per_second=sum(lengths) / phase.seconds,
        policy_version=phase.rollouts[0].policy_version,
        drafter_version=check.version if check is not None else 0,
        finished_at=time.time(),
        drafter_acceptance=check.acceptance if check is not None else nan,
        retrieval_acceptance=check.retrieval if check is not None else nan,
        drafter_training=check.training if check is not None else "off",
        drafter_set_aside=check.set_aside if check is not None else "",
    )

"""Builds the objects of a run on one rank, and saves them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tlt.base.clock import Moment
from tlt.base.config.schema import Config
from tlt.base.io.files import write_atomically
from tlt.base.spans import SpanName
from tlt.base.types import Purpose, Rollout, resolve_dtype
from tlt.drafter.drafting.retrieval.references import References
from tlt.engine.build.engine import build_backend, load_stored_drafter
from tlt.engine.build.model import adapter_folder, drafter_folder, open_start
from tlt.models.decoder import Transformer
from tlt.models.hf.peft import save_adapter
from tlt.models.hf.weights import save_model
from tlt.models.packed import layer_by_layer
from tlt.tasks.rewards.pool import RewardPool
from tlt.training.build.policy import build_policy_trainer, master_dtype, reward_spec, saved_dtype
from tlt.training.build.run_engine import engine_settings
from tlt.training.build.watched_drafter import watch_drafter
from tlt.training.build.world import layout_of
from tlt.training.evaluations import Evaluations, is_judged_by_reward
from tlt.training.launch.signals import STOPPING
from tlt.training.problems import check_same_problems, load_problems
from tlt.training.ranks.sharding import FullTensors, full_tensor
from tlt.training.ranks.waiting import on_all_ranks, on_leader
from tlt.training.ranks.world import World, broadcast_json, gather_objects
from tlt.training.report.console import Console
from tlt.training.report.environment import append_environment
from tlt.training.report.log import LOG
from tlt.training.report.record import MetricsWriter
from tlt.training.report.timeline import Timeline, rank_path, shared_epoch
from tlt.training.report.trackers import TrackedRun
from tlt.training.report.tracking import NO_TRACKING, Tracking, track
from tlt.training.rollout.idle_time import build_idle_choice
from tlt.training.rollout.phase import RolloutPhase
from tlt.training.rollout.protocol import Sinks
from tlt.training.rollout.result import PhaseResult
from tlt.training.rollout.work_queue import WorkQueue, connect_work_queue
from tlt.training.saved.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Saved,
    find_checkpoint,
    load_checkpoint,
)
from tlt.training.saved.inputs import Inputs, resolved_from
from tlt.training.saved.journal import FileJournal
from tlt.training.saved.responses import KeptResponses, forget_responses
from tlt.training.saved.run_folder import FolderLock
from tlt.training.saved.run_identity import identify_run

if TYPE_CHECKING:
    from tlt.training.launch.signals import StopRequest


class Run:
    """The objects of one run on one rank, as its last checkpoint left them.

    step: updates done, `first_step` of them by earlier attempts.
    unmeasured_seconds: of rollouts since the last measurement of the speedup.
    lengths: mean length of each problem's latest responses, in tokens.

    queue: shared by several runs in one process group; None: the run's own.
    prints: whether the leader prints the run and hands its figures to trackers.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        stop: StopRequest,
        queue: WorkQueue | None = None,
        prints: bool = True,
        began: Moment | None = None,
    ) -> None:
        self.config, self.world = config, world
        self.began, began_at = began or Moment.now(), time.time()
        self.lock = FolderLock(self.out_dir) if world.is_leader else None
        if world.is_leader:
            with write_atomically(self.out_dir / "config.json") as file:  # a resumed run writes it again
                file.write(config.to_json())
        epoch = shared_epoch(world.rank, partial(gather_objects, world))
        self.console = Console(
            enabled=prints and world.is_leader,
            num_steps=config.run.num_steps,
            log=self.out_dir / LOG,
            stopping=lambda: STOPPING if stop.is_set() else "",
        )
        self._stop = stop
        stop.show(self.console.is_live)
        path = rank_path(self.out_dir, world.rank)
        self.timeline = Timeline(world.rank, path, epoch, say=self.console.note)
        try:
            with self.console.status("loading model and problems"):
                self._load(queue, stop)
            if world.is_leader:  # not of a refused run
                append_environment(self.out_dir, began_at, world.world_size)
        except BaseException:  # Ctrl-C while loading, too: give terminal and folder back
            self._leave()
            raise
        self.tracking = self._track() if prints and world.is_leader else NO_TRACKING

    @property
    def out_dir(self) -> Path:
        return self.config.run.out_dir

    @property
    def policy(self) -> Transformer:
        return self.trainer.model

    @property
    def seconds(self) -> float:
        return self.began.seconds

    # ── building ────────────────────────────────────────────────────────────────────────────────────────────

    def _load(self, queue: WorkQueue | None, stop: StopRequest) -> None:
        """Worker processes come last, so that an earlier error has none to end."""
        config, world = self.config, self.world
        self.problems = load_problems(config, "train")
        self.held_out = load_problems(config, "test") if config.evaluation.num_problems else []
        check_same_problems(world, self.problems, self.held_out)
        self.master_dtype, self.saved_dtype = master_dtype(config), saved_dtype(config)
        model = open_start(config, self.master_dtype)
        self.model_folder = model.path
        assert model.tokenizer is not None, "problems have been encoded with it"
        self.params = model.with_ends(config.sampling.params(config.run.seed, model.stop_ids))
        self.is_sharded = layout_of(config).is_sharded
        self.trainer = build_policy_trainer(config, model, world, self.is_sharded)
        problems = {"train": self.problems, "test": self.held_out}
        resolved = resolved_from(model.tokenizer, self.params)
        base, adapter = self.trainer.base, adapter_folder(config)
        self.inputs = Inputs.of(config, problems, model.path, base, adapter, resolved)
        stored = load_stored_drafter(drafter_folder(config), model)
        longest_prompt = max(len(problem.prompt_ids) for problem in (*self.problems, *self.held_out))
        window = longest_prompt + config.sampling.max_tokens
        settings = replace(engine_settings(config, world.device), window=window)
        self.references = References()
        self.lengths: dict[str, float] = {}
        ahead, compares = config.rollout.steps_ahead > 0, config.rollout.compares_idle_work
        self.idle_choice = build_idle_choice(
            world, self.timeline.epoch.machine, ahead, config.drafter.train, compares
        )
        self.engine = build_backend(
            model, settings, stored, on_span=self.timeline.add, references=self.references
        )
        self.drafter_training = watch_drafter(
            config.drafter, stored, self.engine, world, self.timeline, seed=config.run.seed
        )
        self.checkpoints = CheckpointWriter(self.out_dir / "checkpoints", world, config.run.keep_checkpoints)
        self.step = self.first_step = self._resume()
        self.unmeasured_seconds = 0.0
        self.speedups: list[float] = []
        self.publish(self.step)
        kept, by_reward = self.out_dir / "evaluations.jsonl", is_judged_by_reward(config.rewards.functions)
        self.evaluations = Evaluations(
            kept, self.step, world.is_leader, partial(broadcast_json, world), by_reward
        )
        self.metrics = MetricsWriter(self.out_dir / "metrics.jsonl", self.step) if world.is_leader else None
        if world.is_leader:
            forget_responses(self.out_dir, self.step, {one.step for one in self.evaluations.all})

        rewards = config.rewards
        self.scorers = RewardPool(reward_spec(config), rewards.num_workers, rewards.timeout_seconds)
        queue = queue or connect_work_queue(
            world.store, world.rank, world.world_size, timeout=world.timeout_seconds
        )
        self.journal = self._open_journal()
        decode = model.tokenizer.decode
        sinks = Sinks(self.scorers, decode, self.journal)
        gib, say = config.run.keep_responses, self.console.note
        in_thought = model.tokenizer.is_in_thought
        self.responses = KeptResponses(self.out_dir, decode, gib, say, in_thought) if gib else None
        self.decode = decode
        tell = self.console.progress if world.is_leader else None
        stops, timeline = stop.is_set, self.timeline
        self.phase = RolloutPhase(world, self.engine, queue, sinks, timeline, stops, tell)

    def _resume(self) -> int:
        self._follows = ""  # digest of the restored checkpoint's predecessor
        found = find_checkpoint(self.checkpoints.folder, self.world)
        identify = partial(identify_run, self.out_dir, self.config, self.inputs, self.console.note)
        self.id = broadcast_json(
            self.world, on_all_ranks(self.world, lambda: identify() if self.world.is_leader else "")
        )
        if found is None:
            return 0
        path, manifest = found
        own = load_checkpoint(path, manifest, self._tensors(), self.world)
        self.trainer.restore(manifest.counters["policy"])
        self.drafter_training.restore(manifest.counters["drafter"], own[0]["drafter"])
        self.idle_choice.restore(manifest.counters["idle"])
        if self.engine.tuner is not None:
            self.engine.tuner.restore(own[0]["tuner"])
        if self.engine.drafter is not None:
            self.engine.drafter.restore([known["drafting"] for known in own])
        self.checkpoints.saved = Saved(manifest.step, manifest.digest)
        self._follows = manifest.counters["follows"]
        self.console.note(f"resumed after {manifest.step} updates from {path}")
        return manifest.step

    def _saved(self) -> Saved:
        return self.checkpoints.saved or Saved()

    def _open_journal(self) -> FileJournal:
        return FileJournal(
            self.out_dir / "journal",
            self.world,
            run=self.id,
            saved=self._saved,
            follows=self._follows,
            timeline=self.timeline,
            say=self.console.note,
            inputs=self.inputs,
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {**self.trainer.tensors(), **self.drafter_training.tensors()}

    def _track(self) -> Tracking:
        settings, folder = self.config.tracking, self.out_dir
        if not settings.use:
            return NO_TRACKING
        project = settings.project or os.environ.get("WANDB_PROJECT") or "tlt"
        config = self.config.model_dump(mode="json")
        run = TrackedRun(settings.run_name or folder.name, project, self.id, folder, config, self.step)
        return track(settings.use, run, self.console.note)

    # ── what the loop asks for ──────────────────────────────────────────────────────────────────────────────

    def note_lengths(self, rollouts: Sequence[Rollout]) -> None:
        by_problem: dict[str, list[int]] = {}
        for rollout in rollouts:
            by_problem.setdefault(rollout.problem_id, []).append(len(rollout.token_ids))
        self.lengths.update({problem: sum(lengths) / len(lengths) for problem, lengths in by_problem.items()})

    def keep_responses(self, purpose: Purpose, phase: PhaseResult) -> None:
        if self.responses is not None and self.world.is_leader:
            if purpose == "rollout":
                self.responses.write(purpose, self.step, self.step + 1, phase)
            else:
                self.responses.write(purpose, 0, self.step, phase)

    def publish(self, version: int) -> None:
        """version: updates behind the policy."""
        with self.timeline.span(SpanName.PUBLISH):
            tensors = FullTensors(self.policy, resolve_dtype(self.config.run.dtype, self.world.device.type))
            self.engine.load_policy_parts(layer_by_layer(tensors), version)

    def checkpoint(self) -> None:
        """Every rank calls it and writes its part."""
        with self.timeline.span(SpanName.CHECKPOINT):
            self.check_folder()
            self.checkpoints.wait()  # the new one names the one before
            counters = {
                "policy": self.trainer.counters(),
                "drafter": self.drafter_training.counters(),  # training, shared by all ranks
                "idle": self.idle_choice.counters(),
                "follows": self._saved().digest,
            }
            drafting = {} if self.engine.drafter is None else self.engine.drafter.counters()
            tuner = {} if self.engine.tuner is None else self.engine.tuner.counters()
            own = {
                "drafter": self.drafter_training.own_counters(),  # training, this rank's part
                "tuner": tuner,
                "drafting": drafting,  # measured by the engine's drafter while drafting
            }
            self.checkpoints.save(Checkpoint(self.step, self.id, self._tensors(), counters, own, self.inputs))

    def check_folder(self) -> None:
        """Raises UserError if the run's folder is gone: writing would create it anew."""
        if self.lock is not None:
            self.lock.check()

    def save_policy(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """In transformers' format. Every rank calls it; rank 0 writes.

        extra: further keys of its config.json.
        """
        self.check_folder()
        config, tensors = self.policy.config, FullTensors(self.policy)
        if self.is_sharded and not self.world.is_leader:
            for _ in tensors.values():  # a gather is a collective
                pass
        write = partial(
            save_model,
            folder,
            config,
            tensors,
            dtype=self.saved_dtype,
            source=self.model_folder,
            extra=extra,
        )
        on_leader(self.world, f"{folder} after {self.step} updates", write)

    def save_adapter(self, folder: Path) -> None:
        """In PEFT's format. Every rank calls it; rank 0 writes."""
        model, parameters = self.config.model, self.policy.named_parameters()
        tensors = {
            name: full_tensor(parameter).cpu() for name, parameter in parameters if parameter.requires_grad
        }
        write = partial(save_adapter, folder, self.config.lora, tensors, str(model.path), model.revision)
        on_leader(self.world, f"{folder} after {self.step} updates", write)

    def close(self) -> None:
        self.checkpoints.close()
        self.engine.close()
        if self.metrics is not None:
            self.metrics.close()
        self.scorers.close()
        self.journal.close()
        self.tracking.finish()
        self._leave()

    def _leave(self) -> None:
        """A notebook may keep this object with an error's traceback."""
        self._stop.show(False)
        self.console.close()
        if self.lock is not None:
            self.lock.release()

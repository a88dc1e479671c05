"""A run on one rank: its data, models and files, and what the loop asks of them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt.base.clock import Moment
from tlt.base.config.schema import Config
from tlt.base.io.files import write_atomically
from tlt.base.io.hub import Repository
from tlt.base.spans import SpanName
from tlt.base.types import Purpose, Rollout, resolve_dtype
from tlt.engine.build.model import open_start
from tlt.models.decoder import Policy
from tlt.models.hf.peft import save_adapter
from tlt.models.hf.weights import save_model
from tlt.models.packed import layer_by_layer
from tlt.tasks.rewards.pool import RewardPool
from tlt.training.build.environment import build_between_turns
from tlt.training.build.layout import layout_of
from tlt.training.build.models import build_models
from tlt.training.build.policy import master_dtype, reward_spec, saved_dtype
from tlt.training.build.problems import chat_format, check_same_problems
from tlt.training.build.run_data import read_run_data
from tlt.training.build.run_files import AttemptStart, open_files
from tlt.training.launch.signals import STOPPING
from tlt.training.ranks.sharding import FullTensors, full_tensor
from tlt.training.ranks.waiting import on_all_ranks, on_leader
from tlt.training.ranks.world import World, broadcast_json, gather_objects
from tlt.training.report.console import Console
from tlt.training.report.log import LOG
from tlt.training.report.timeline import Timeline, rank_path, shared_epoch
from tlt.training.report.trackers import TrackedRun
from tlt.training.report.tracking import NO_TRACKING, Tracking, track
from tlt.training.report.versions import append_environment
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
from tlt.training.saved.inputs import Inputs
from tlt.training.saved.run_folder import FolderLock
from tlt.training.saved.run_identity import identify_run

if TYPE_CHECKING:
    from tlt.training.launch.signals import StopRequest


class Run:
    """One run on one rank, as its last checkpoint left it.

        data      what it learns from    build/run_data.py
        models    what it computes with  build/models.py
        files     where it writes        build/run_files.py

    step: updates done, `first_step` of them by earlier attempts.
    unmeasured_seconds: of rollouts since the speedup was measured.
    lengths: mean length of each problem's latest responses, in tokens.

    queue: shared by several runs in one process group; None: the run's own.
    prints: the leader prints, and hands figures to trackers.
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
        stop.show(self.console.is_live)  # live lines tell of Ctrl-C themselves
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
    def policy(self) -> Policy:
        return self.models.trainer.model

    @property
    def seconds(self) -> float:
        return self.began.seconds

    # ── building ────────────────────────────────────────────────────────────────────────────────────────────

    def _load(self, queue: WorkQueue | None, stop: StopRequest) -> None:
        """Worker processes come last: an earlier error has none to end."""
        config, world = self.config, self.world
        model = open_start(config, master_dtype(config))
        assert model.tokenizer is not None, "the preflight has encoded the problems with it"
        self.data = read_run_data(config, model.tokenizer, model.config)
        check_same_problems(world, self.data.problems, self.data.held_out)
        self.models = build_models(config, model, world, self.timeline, self.data.longest_prompt)
        inputs = self.data.inputs(self.models.trainer.initial_digest)
        folder, keep = self.out_dir / "checkpoints", config.run.keep_checkpoints
        attempt = self._resume(folder, inputs)
        checkpoints = CheckpointWriter(folder, world, keep, saved=attempt.saved)
        self.step = self.first_step = attempt.saved.step
        self.unmeasured_seconds = 0.0
        self.speedups: list[float] = []
        self.lengths: dict[str, float] = {}
        self.publish(self.step)
        say = self.console.note
        self.files = open_files(config, world, self.data, attempt, checkpoints, self.timeline, say)
        rewards = config.rewards
        self.scorers = RewardPool(reward_spec(config), rewards.num_workers, rewards.timeout_seconds)
        chat, window = chat_format(config), model.config.max_positions
        self.between_turns = build_between_turns(
            config.environment,
            model.tokenizer,
            chat,
            window,
            keeps_states=self.scorers.reads_environments,
            keeps_routes=config.rollout.router_replay,
        )
        sinks = Sinks(self.scorers, self.data.decode, self.files.journal, self.between_turns)
        queue = queue or connect_work_queue(
            world.store, world.rank, world.world_size, timeout=world.timeout_seconds
        )
        show = self.console.progress if world.is_leader else None
        engine, timeline = self.models.engine, self.timeline
        self.phase = RolloutPhase(world, engine, queue, sinks, timeline, stop.is_set, show)

    def _resume(self, folder: Path, inputs: Inputs) -> AttemptStart:
        world, found = self.world, find_checkpoint(folder, self.world)
        identify = partial(identify_run, self.out_dir, self.config, inputs, self.console.note)
        # the leader reads the files; its mistake is raised on all ranks
        run_id = broadcast_json(world, on_all_ranks(world, lambda: identify() if world.is_leader else ""))
        if found is None:
            return AttemptStart(run_id, inputs)
        path, manifest = found
        own = load_checkpoint(path, manifest, self.models.tensors(), world)
        self.models.restore(manifest.counters, own)
        self.console.note(f"resumed after {manifest.step} updates from {path}")
        saved = Saved(manifest.step, manifest.digest)
        return AttemptStart(run_id, inputs, saved, manifest.counters["follows"])

    def _track(self) -> Tracking:
        settings, folder = self.config.tracking, self.out_dir
        if not settings.use:
            return NO_TRACKING
        project = settings.project or os.environ.get("WANDB_PROJECT") or "tlt"
        config, run_id = self.config.model_dump(mode="json"), self.files.attempt.run
        run = TrackedRun(settings.run_name or folder.name, project, run_id, folder, config, self.step)
        return track(settings.use, run, self.console.note)

    # ── what the loop asks for ──────────────────────────────────────────────────────────────────────────────

    def note_lengths(self, rollouts: Sequence[Rollout]) -> None:
        by_problem: dict[str, list[int]] = {}
        for rollout in rollouts:
            by_problem.setdefault(rollout.problem_id, []).append(len(rollout.token_ids))
        self.lengths.update({problem: sum(lengths) / len(lengths) for problem, lengths in by_problem.items()})

    def keep_responses(self, purpose: Purpose, phase: PhaseResult) -> None:
        if self.files.responses is not None and self.world.is_leader:
            if purpose == "rollout":
                self.files.responses.write(purpose, policy_step=self.step, number=self.step + 1, phase=phase)
            else:
                self.files.responses.write(purpose, policy_step=0, number=self.step, phase=phase)

    def publish(self, version: int) -> None:
        with self.timeline.span(SpanName.PUBLISH):
            tensors = FullTensors(self.policy, resolve_dtype(self.config.run.dtype, self.world.device.type))
            self.models.engine.load_policy_parts(layer_by_layer(tensors), version)

    def checkpoint(self) -> None:
        """Every rank calls it."""
        files, models = self.files, self.models
        with self.timeline.span(SpanName.CHECKPOINT):
            self.check_folder()
            files.checkpoints.wait()  # the new one names the one before
            counters = {**models.counters(), "follows": files.checkpoints.saved.digest}
            own = models.own_counters()
            run, inputs = files.attempt.run, files.attempt.inputs
            files.checkpoints.save(Checkpoint(self.step, run, models.tensors(), counters, own, inputs))

    def check_folder(self) -> None:
        """UserError if the run's folder is gone: writing would create it anew."""
        if self.lock is not None:
            self.lock.check()

    def save_policy(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """In transformers' format. Every rank calls it. extra: further keys of config.json."""
        self.check_folder()
        config, tensors = self.policy.config, FullTensors(self.policy)
        if layout_of(self.config).is_sharded and not self.world.is_leader:
            for _ in tensors.values():  # a gather is a collective
                pass
        write = partial(
            save_model,
            folder,
            config,
            tensors,
            dtype=saved_dtype(self.config),
            source=self.data.tokenizer.path,
            extra=extra,
        )
        on_leader(self.world, f"{folder} after {self.step} updates", write)

    def save_adapter(self, folder: Path) -> None:
        """In PEFT's format. Every rank calls it."""
        model, parameters = self.config.model, self.policy.named_parameters()
        tensors = {
            name: full_tensor(parameter).cpu() for name, parameter in parameters if parameter.requires_grad
        }
        of = self.policy.config, self.config.lora
        repository = None if model.path.exists() else Repository.parse(model.path)
        base = (str(model.path), None) if repository is None else (repository.name, repository.revision)
        write = partial(save_adapter, folder, *of, tensors, *base)
        on_leader(self.world, f"{folder} after {self.step} updates", write)

    def close(self) -> None:
        self.files.checkpoints.close()
        self.models.engine.close()
        if self.files.metrics is not None:
            self.files.metrics.close()
        self.scorers.close()
        self.between_turns.close()
        self.files.journal.close()
        self.tracking.finish()
        self._leave()

    def _leave(self) -> None:
        """A notebook may keep this object with an error's traceback."""
        self._stop.show(False)
        self.console.close()
        if self.lock is not None:
            self.lock.release()

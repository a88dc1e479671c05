"""The objects of a run on one rank, made once. Knows how they are put together, not in which order the
loop uses them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tlt.assembly.drafter import watch_drafter
from tlt.assembly.engine import EngineSettings, build_backend, load_stored
from tlt.assembly.model import adapter_folder, all_ranks, drafter_folder, local_ranks, num_gpus, open_start
from tlt.assembly.policy import build_policy_trainer, master_dtype, reward_spec
from tlt.clock import Moment
from tlt.config.schema import Config
from tlt.drafter.drafting.references import References
from tlt.drafter.formats.folder import StoredDrafter
from tlt.hf.peft import save_adapter
from tlt.hf.weights import save_model
from tlt.io.files import write_atomically
from tlt.launch.place import find_place
from tlt.models.decoder import Transformer
from tlt.ranks.sharding import FullTensors, LayoutChoice, choose_layout, full_tensor, layer_by_layer
from tlt.ranks.waiting import on_all_ranks, on_leader
from tlt.ranks.world import (
    DeviceChoice,
    Rendezvous,
    World,
    broadcast_bytes,
    broadcast_json,
    choose_device,
    gather_objects,
    init_process_group_from_env,
)
from tlt.report.console import Console
from tlt.report.record import MetricsWriter
from tlt.report.timeline import Timeline, rank_path, shared_epoch
from tlt.report.trackers import TrackedRun
from tlt.report.tracking import NO_TRACKING, Tracking, track
from tlt.rewards.pool import RewardPool
from tlt.rollout.idle_time import idle_choice
from tlt.rollout.phase import RolloutPhase
from tlt.rollout.protocol import DrafterSide, Journal, Receivers
from tlt.rollout.result import PhaseResult
from tlt.rollout.work_queue import WorkQueue, connect_work_queue
from tlt.saved.checkpoint import Checkpoint, CheckpointWriter, Saved, find_checkpoint, load_checkpoint
from tlt.saved.inputs import Inputs
from tlt.saved.journal import FileJournal
from tlt.saved.replay import Prompts, Replay, ReplayOf, prompts_of
from tlt.saved.responses import KeptResponses, forget_responses
from tlt.saved.run_folder import FolderLock
from tlt.saved.run_identity import identify_run
from tlt.spans import SpanName
from tlt.training.evaluations import Evaluations, is_judged_by_reward
from tlt.training.problems import check_same_problems, load_problems
from tlt.types import Purpose, Rollout, UserError, resolve_dtype

if TYPE_CHECKING:
    from tlt.launch.signals import StopRequest


class Run:
    """Holds the objects of one run on one rank, as its last checkpoint left them.

    step: updates done; `first_step` of them by earlier attempts.
    id: as trackers know it.
    inputs: what it computes from.
    drafter: who looks after the learned drafter.
    metrics: None but on the leader.

    queue: the work queue of runs that share one; None: a queue of its own.
    prints: whether the leader shows the run, also to its trackers.
    began: when the user's command did; None: now.
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
        self.began = began or Moment.now()
        self.lock = FolderLock(self.out_dir) if world.is_leader else None
        if world.is_leader:
            with write_atomically(self.out_dir / "config.json") as file:  # a resumed run writes it again
                file.write(config.to_json())
        epoch = shared_epoch(world.rank, partial(gather_objects, world))
        self.console = Console(enabled=prints and world.is_leader, num_steps=config.run.num_steps)
        self.timeline = Timeline(
            world.rank, rank_path(self.out_dir, world.rank), epoch, say=self.console.note
        )
        try:
            with self.console.status("loading model and problems"):
                self._load(queue, stop)
        except BaseException:  # Ctrl-C while loading, too: terminal and folder are given back
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
        """Seconds since the user's command began."""
        return self.began.seconds

    # ── making ──────────────────────────────────────────────────────────────────────────────────────────────

    def _load(self, queue: WorkQueue | None, stop: StopRequest) -> None:
        """Makes everything else; worker processes last, for what fails before has none to end."""
        config, world = self.config, self.world
        self.problems = load_problems(config, "train")
        self.held_out = load_problems(config, "test") if config.evaluation.num_problems else []
        check_same_problems(world, self.problems, self.held_out)
        self.master_dtype = master_dtype(config)
        model = open_start(config, self.master_dtype)
        self.model_folder = model.path
        assert model.tokenizer is not None, "problems have been encoded with it"
        self.params = config.sampling.params(config.run.seed, model.stop_ids)
        self.is_sharded = layout_of(config).is_sharded
        self.trainer = build_policy_trainer(config, model, world, self.is_sharded)
        problems = {"train": self.problems, "test": self.held_out}
        self.inputs = Inputs.of(config, problems, model.path, self.trainer.base, adapter_folder(config))
        stored = load_stored(drafter_folder(config), model)
        longest_prompt = max(len(problem.prompt_ids) for problem in (*self.problems, *self.held_out))
        window = longest_prompt + config.sampling.max_tokens
        settings = replace(EngineSettings.of_run(config, world.device), window=window)
        self.references = References(config.rollout.references_mib)
        self.lengths: dict[str, float] = {}
        ahead, compares = config.rollout.steps_ahead > 0, config.rollout.compares_idle_work
        self.idle = idle_choice(world, self.timeline.epoch.machine, ahead, config.drafter.train, compares)
        self.engine = build_backend(
            model, settings, stored, on_span=self.timeline.add, references=self.references
        )
        self.drafter = self._watch_drafter(stored)
        self.checkpoints = CheckpointWriter(self.out_dir / "checkpoints", world, config.run.keep_checkpoints)
        self.step = self.first_step = self._resume()
        self.publish(self.step)
        kept, by_reward = self.out_dir / "evaluations.jsonl", is_judged_by_reward(config.rewards.functions)
        self.evaluations = Evaluations(
            kept, self.step, world.is_leader, partial(broadcast_json, world), by_reward
        )
        self.metrics = MetricsWriter(self.out_dir / "metrics.jsonl", self.step) if world.is_leader else None
        if world.is_leader:
            forget_responses(
                self.out_dir, self.step, {evaluation.step for evaluation in self.evaluations.all}
            )

        self.scorers = RewardPool(
            reward_spec(config), config.rewards.num_workers, config.rewards.timeout_seconds
        )
        queue = queue or connect_work_queue(
            world.store, world.rank, world.world_size, timeout=world.timeout_seconds
        )
        self.journal = self._open_journal() if config.run.journal else Journal()
        receivers = Receivers(self.scorers, model.tokenizer.decode, self.journal)
        self.responses = (
            KeptResponses(self.out_dir, model.tokenizer.decode) if config.run.keep_responses else None
        )
        self.replay = self._replay()
        migrates = config.rollout.migrate
        self.phase = RolloutPhase(world, self.engine, queue, receivers, self.timeline, stop.is_set, migrates)

    def _watch_drafter(self, stored: StoredDrafter | None) -> DrafterSide:
        settings, seed = self.config.drafter, self.config.run.seed
        return watch_drafter(settings, stored, self.engine, self.world, self.timeline, seed=seed)

    def _resume(self) -> int:
        """Takes up the last checkpoint, if there is one; returns the updates done."""
        self._follows = ""  # digest of the checkpoint before the one that the run goes on from
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
        self.drafter.restore(manifest.counters["drafter"], own[0]["drafter"])
        if idle := manifest.counters.get("idle"):  # an older checkpoint says nothing of it
            self.idle.restore(idle)
        if self.engine.tuner is not None:
            self.engine.tuner.restore(own[0]["tuner"])
        if self.engine.drafter is not None:
            self.engine.drafter.restore([known["drafting"] for known in own])
        self._recall_references()
        self.checkpoints.saved, self._follows = (
            Saved(manifest.step, manifest.digest),
            manifest.counters["follows"],
        )
        self.console.note(f"resumed after {manifest.step} updates from {path}")
        return manifest.step

    @property
    def _references_file(self) -> Path:
        return self.out_dir / "references.safetensors"

    def _recall_references(self) -> None:
        """Takes up what could be drafted from at the last checkpoint. A guess is worth no run's end: it
        goes on without."""
        path = self._references_file
        data = path.read_bytes() if self.world.is_leader and path.is_file() else b""
        if data := broadcast_bytes(self.world, data):
            try:
                self.references.restore(data, self.policy.config.vocab_size)
            except ValueError as error:
                self.console.note(f"{path}: is left out, for it is not as it was written ({error})")

    def _keep_references(self) -> None:
        """Writes down what can be drafted from, which is the same on all ranks."""
        if (
            self.world.is_leader
            and self.config.rollout.uses_references
            and (data := self.references.encode())
        ):
            with write_atomically(self._references_file) as file:
                file.buffer.write(data)

    def _replay(self) -> Replay:
        """Returns who lends this run the responses of another."""
        if self.config.rollout.replay is None:
            return Replay()
        prompts: dict[Purpose, Prompts] = {
            "rollout": prompts_of(self.problems),
            "evaluation": prompts_of(self.held_out),
        }
        shape, say = self.policy.config, self.console.note
        return ReplayOf(
            self.config.rollout.replay, self.references, self.world, prompts, self.params, shape, say
        )

    def _saved(self) -> Saved:
        """Returns the latest checkpoint that is whole, or the run's beginning."""
        return self.checkpoints.saved or Saved()

    def _open_journal(self) -> Journal:
        """Opens this replica's journal, and finds what earlier attempts have left in theirs."""
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
        """Returns all that trains, by name, as this rank holds it: what a checkpoint keeps and fills."""
        return {**self.trainer.tensors(), **self.drafter.tensors()}

    def _track(self) -> Tracking:
        """Starts the trackers that the configuration asks for."""
        settings, folder = self.config.tracking, self.out_dir
        if not settings.use:
            return NO_TRACKING
        project = settings.project or os.environ.get("WANDB_PROJECT") or "tlt"
        config = self.config.model_dump(mode="json")
        run = TrackedRun(settings.run_name or folder.name, project, self.id, folder, config, self.step)
        return track(settings.use, run, self.console.note)

    # ── what the loop asks for ──────────────────────────────────────────────────────────────────────────────

    def note_lengths(self, rollouts: Sequence[Rollout]) -> None:
        """Remembers how long the responses to each problem were."""
        by_problem: dict[str, list[int]] = {}
        for rollout in rollouts:
            by_problem.setdefault(rollout.problem_id, []).append(len(rollout.token_ids))
        self.lengths.update({problem: sum(lengths) / len(lengths) for problem, lengths in by_problem.items()})

    def keep_responses(self, purpose: Purpose, phase: PhaseResult) -> None:
        """Writes the responses of this step, or of an evaluation now, into the run's folder, if that is
        asked for."""
        if self.responses is not None and self.world.is_leader:
            policy_step = self.step if purpose == "rollout" else 0
            self.responses.write(purpose, policy_step, self.step, phase)

    def publish(self, version: int) -> None:
        """Gives the engine the policy as it is now, layer by layer; its version is the number of updates
        behind it."""
        with self.timeline.span(SpanName.PUBLISH):
            tensors = FullTensors(self.policy, resolve_dtype(self.config.run.dtype))
            self.engine.load_policy_parts(layer_by_layer(tensors), version)

    def checkpoint(self) -> None:
        """Keeps all that the rest of the run depends on; every rank calls it, and writes its part."""
        with self.timeline.span(SpanName.CHECKPOINT):
            self.check_folder()
            self._keep_references()
            self.checkpoints.wait()  # this one follows the one before
            own_state = {
                "policy": self.trainer.counters(),
                "drafter": self.drafter.counters(),
                "idle": self.idle.counters(),
            }
            counters = {**own_state, "follows": self._saved().digest}
            drafting = {} if self.engine.drafter is None else self.engine.drafter.counters()
            tuner = {} if self.engine.tuner is None else self.engine.tuner.counters()
            own = {"drafter": self.drafter.own_counters(), "tuner": tuner, "drafting": drafting}
            self.checkpoints.save(Checkpoint(self.step, self.id, self._tensors(), counters, own, self.inputs))

    def check_folder(self) -> None:
        """Raises UserError, on the leader, where the run's folder is not there any more: writing would
        make another."""
        if self.lock is not None:
            self.lock.check()

    def save_policy(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Writes the policy as a checkpoint that transformers loads; every rank calls it, and rank 0
        writes. extra: further keys of its config.json."""
        self.check_folder()
        config, tensors = self.policy.config, FullTensors(self.policy)
        if self.is_sharded and not self.world.is_leader:
            for _ in tensors.values():  # rank 0 gathers every tensor, and all take part
                pass
        write = partial(
            save_model,
            folder,
            config,
            tensors,
            dtype=self.master_dtype,
            source=self.model_folder,
            extra=extra,
        )
        on_leader(self.world, f"{folder} after {self.step} updates", write)

    def save_adapter(self, folder: Path) -> None:
        """Writes what LoRA has trained as a folder that PEFT loads; every rank calls it, and rank 0
        writes."""
        model, trained = (
            self.config.model,
            {name: p for name, p in self.policy.named_parameters() if p.requires_grad},
        )
        tensors = {name: full_tensor(parameter).cpu() for name, parameter in trained.items()}
        write = partial(save_adapter, folder, self.config.lora, tensors, str(model.path), model.revision)
        on_leader(self.world, f"{folder} after {self.step} updates", write)

    def close(self) -> None:
        """Ends worker processes and gives up files, terminal and folder."""
        self.checkpoints.close()
        self.engine.close()
        if self.metrics is not None:
            self.metrics.close()
        self.scorers.close()
        self.journal.close()
        self.tracking.finish()
        self._leave()

    def _leave(self) -> None:
        """Gives the terminal back, and the folder: a notebook that keeps an error's traceback keeps this
        object, too."""
        self.console.close()
        if self.lock is not None:
            self.lock.release()


def device_of(config: Config) -> DeviceChoice:
    """Returns the kind of device that the ranks of this machine compute on. Who has started them says how
    many they are; `tlt train` starts all of them here."""
    place = find_place()
    num_ranks = local_ranks(config)
    has_own_gpu = place is not None and place.has_own_gpu and torch.cuda.is_available()
    return choose_device(config.run.device, num_ranks, num_ranks if has_own_gpu else num_gpus(config))


def layout_of(config: Config) -> LayoutChoice:
    """Returns how the policy lies on the ranks of all machines. Raises UserError for keys that contradict
    it."""
    wanted = config.parallel.param_dtype
    layout = choose_layout(config.parallel.policy, all_ranks(config), device_of(config).name)
    if not layout.is_sharded and wanted is not None and resolve_dtype(wanted) != master_dtype(config):
        raise UserError(
            f"parallel.param_dtype: {wanted} is for a sharded policy, and this one is replicated "
            f"({layout.reason}); "
            "give --parallel.policy fsdp, or leave param_dtype out"
        )
    return layout


def join_ranks(config: Config, met: Rendezvous | None = None) -> World:
    """Joins the ranks of the run that the environment describes, with the configuration's threads and
    device. met: the ranks, where they have met already."""
    torch.set_num_threads(config.run.threads_per_rank)
    is_sharded = layout_of(config).is_sharded
    return init_process_group_from_env(
        device_of(config).name, config.run.timeout_seconds, met, group_of_one=is_sharded
    )

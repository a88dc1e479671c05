"""Puts together what the user names: a folder becomes a model, a model and its settings become an engine with a drafter, a
configuration becomes those who train policy and drafter.

    folder ── load_model ──▶ Model ──┐
    drafter/ ── load_drafter ────────┼── build_engine ──▶ RolloutEngine with policy, tuner and drafter
    EngineSettings ──────────────────┘

This is the only place that does so, for the command line, the training run, the benchmarks and the Python API alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.config.drafter import DrafterSection
from tlt.config.schema import Config
from tlt.distributed.place import find_place
from tlt.distributed.sharding import fill, mesh_of, shard
from tlt.distributed.world import World
from tlt.drafter.buffer import TrajectoryBuffer
from tlt.drafter.folder import StoredDrafter, choose_preset, load_drafter
from tlt.drafter.hybrid import drafter_kinds, make_drafter
from tlt.drafter.learned import LearnedDrafter, LearnedSettings, OnVerdicts
from tlt.drafter.model import DraftModel, PackedDrafter
from tlt.drafter.spot import SpotTrainer
from tlt.drafter.trainer import DrafterTrainer
from tlt.engine.engine import RolloutEngine
from tlt.engine.memory import automatic_bytes
from tlt.engine.sequence import Decode
from tlt.hub import resolve_model
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf_config import load_model_config
from tlt.models.hf_weights import StoredTensors
from tlt.models.lora import BaseOf, add_adapters, is_of_adapter, start_value
from tlt.models.packed import PackedTransformer
from tlt.models.tokenizer import Tokenizer, has_tokenizer, load_tokenizer, read_stop_ids
from tlt.rl.scoring import RewardSpec
from tlt.rl.update import PolicyTrainer
from tlt.spans import Span
from tlt.speculative.verify import Verify
from tlt.speculative.verify import verify as verify_by_the_law
from tlt.tuning.tuner import make_tuner
from tlt.types import SamplingParams, StrategyTuner, UserError, resolve_dtype


@dataclass(frozen=True)
class Model:
    """A checkpoint folder, read. tokenizer: None where the folder has none; then prompts have to be token ids."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...]

    @property
    def decode(self) -> Decode | None:
        """Returns the text of a response's tokens; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode


def model_folder(config: Config) -> Path:
    """Returns the local folder of a run's model, which may come from the hub."""
    return resolve_model(config.model.path, config.model.revision)


def drafter_folder(config: Config) -> Path | None:
    """Returns the local folder of a run's drafter, which may come from the hub; None: there is none."""
    return None if config.drafter.path is None else resolve_model(config.drafter.path)


def local_ranks(config: Config) -> int:
    """Returns how many ranks this machine has: who started them says so, and `tlt train` starts all of them here."""
    place = find_place()
    return config.run.num_ranks if place is None else place.local_world_size


def all_ranks(config: Config) -> int:
    """Returns how many ranks all machines have together."""
    place = find_place()
    return config.run.num_ranks if place is None else place.world_size


def load_model(path: Path, dtype: torch.dtype | None = None) -> Model:
    """Reads a checkpoint folder. dtype: of the tensors; None: as they are stored. Raises UserError where it cannot be used."""
    model = open_model(path, dtype)
    return replace(model, tensors=dict(model.tensors))


def open_model(path: Path, dtype: torch.dtype | None = None) -> Model:
    """Does the same, but for the tensors: each is read, and its values are checked, when it is asked for."""
    config = load_model_config(path)
    tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    stop_ids = tokenizer.stop_ids if tokenizer is not None else read_stop_ids(path)
    return Model(path, config, StoredTensors(path, config, dtype), tokenizer, stop_ids)


def resolve_device(wanted: str | torch.device, place: str = "device") -> torch.device:
    """Returns the device that an engine computes on: for "auto" a GPU where there is one. UserError, which begins with `place`,
    for a device that is unknown or not there. (What `run.device` means for several ranks, distributed/world.py says.)"""
    has_cuda = torch.cuda.is_available()
    try:
        device = torch.device(("cuda" if has_cuda else "cpu") if wanted == "auto" else wanted)
    except RuntimeError:
        raise UserError(f"{place}: {wanted!r} is unknown; give auto, cpu or cuda") from None
    if device.type == "cuda" and not has_cuda:
        raise UserError(f"{place}: {wanted} is not available here; give cpu or auto")
    return device


@dataclass(frozen=True)
class EngineSettings:
    """The settings that an engine is built with, beside its weights.

    speculation: "off", "adaptive" or a fixed strategy such as "4x1x4" (Strategy.parse).
    tuner: who chooses when speculation is adaptive: "cost-model" or "beg-mab".
    drafting: how drafters rank, when they stop and what they remember.
    borrows: what the engine can use as the policy has it is read there, not copied (PackedTransformer).
    kv_gib: GiB of all caches; None: as many as `automatic_bytes` says, where `num_ranks` share the machine's memory.
    """

    speculation: str = "off"
    tuner: str = "cost-model"
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    max_batch_size: int = 64
    drafting: DrafterSection = field(default_factory=DrafterSection)
    borrows: bool = False
    kv_gib: float | None = None
    num_ranks: int = 1

    def cache_bytes(self) -> int:
        """Returns the memory that the engine's caches may take from now on."""
        device = torch.device(self.device)
        return automatic_bytes(device, self.num_ranks) if self.kv_gib is None else int(self.kv_gib * 2**30)

    @staticmethod
    def of_run(config: Config, device: torch.device | str) -> EngineSettings:
        """Returns the settings that a run's configuration asks for."""
        rollout, dtype = config.rollout, resolve_dtype(config.run.dtype)
        return EngineSettings(
            rollout.speculation,
            rollout.tuner,
            dtype,
            device,
            rollout.max_batch_size,
            config.drafter,
            kv_gib=rollout.kv_gib,
            num_ranks=local_ranks(config),
        )


def build_engine(
    config: ModelConfig,
    policy: Mapping[str, Tensor],
    settings: EngineSettings,
    drafter: StoredDrafter | None = None,
    *,
    tuner: StrategyTuner | None = None,
    verify: Verify = verify_by_the_law,
    on_span: Callable[[Span], None] | None = None,
    decode: Decode | None = None,
) -> RolloutEngine:
    """Returns an engine that holds the policy and, unless speculation is off, something to draft with: retrieval, and beside it
    the learned `drafter` where one is given.

    policy: tensors by their Hugging Face names.  tuner: chooses in place of the one that the settings name.
    verify: an audit puts a faulty one here.  on_span: receives what the engine spent its time on.
    decode: the text of a response's tokens, in which stop texts are sought.
    Raises UserError for a speculation that needs a drafter which is not there.
    """
    tuner = tuner or make_tuner(settings.speculation, drafter_kinds(drafter is not None), settings.tuner)
    engine = RolloutEngine(
        PackedTransformer(config, settings.dtype, settings.device, settings.borrows),
        max_batch_size=settings.max_batch_size,
        tuner=tuner,
        on_span=on_span,
        verify=verify,
        decode=decode,
        cache_bytes=settings.cache_bytes,
    )
    engine.load_policy(policy)
    if tuner is not None:
        learned = None if drafter is None else build_learned(engine, drafter, settings)
        drafting, slots = settings.drafting, settings.max_batch_size
        engine.load_drafter(make_drafter(learned, slots, drafting.ngram_tokens, drafting.confidence_threshold))
    return engine


def load_engine(
    model: Model, settings: EngineSettings, drafter: Path | None = None, verify: Verify = verify_by_the_law
) -> RolloutEngine:
    """Returns an engine that holds the model, and the drafter of that folder unless speculation is off."""
    stored = load_stored(None if settings.speculation == "off" else drafter, model)
    return build_engine(model.config, model.tensors, settings, stored, verify=verify, decode=model.decode)


def load_stored(drafter: Path | None, model: Model) -> StoredDrafter | None:
    """Reads the drafter folder of a model; None: there is none to read."""
    return None if drafter is None else load_drafter(drafter, model.config, model.tensors)


def build_learned(
    engine: RolloutEngine, drafter: StoredDrafter, settings: EngineSettings, on_verdicts: OnVerdicts | None = None
) -> LearnedDrafter:
    """Returns the drafter at work beside the engine's target. It remembers what training matches only where it is trained."""
    drafting = settings.drafting
    packed = PackedDrafter.from_tensors(drafter.config, drafter.tensors, engine.model.dtype, engine.device)
    learned = LearnedSettings(
        ranking=drafting.ranking,
        tau=drafting.coupling_temperature,
        confidence_threshold=drafting.confidence_threshold,
        window=drafting.feature_window,
        keep_targets=drafting.train and drafting.features == "captured",
    )
    return LearnedDrafter(packed, engine.model, settings.max_batch_size, learned, on_verdicts)


def build_policy_trainer(config: Config, model: Model, world: World, is_sharded: bool = False) -> PolicyTrainer:
    """Returns who updates the policy: it owns a copy of the model's tensors, and a frozen one where the loss has a KL term,
    unless the copy itself is frozen beside its adapters."""

    def build() -> Transformer:
        policy, seed = plan_policy(config, model.config), config.run.seed
        if not is_sharded:
            return build_policy(policy, model, world.device, seed)
        wanted = config.parallel.param_dtype
        return build_sharded_policy(policy, model, world, None if wanted is None else resolve_dtype(wanted), seed)

    policy, reference = build(), None
    if config.algorithm.kl_coefficient > 0:
        reference = BaseOf(policy) if config.lora.rank else build()
    return PolicyTrainer(
        policy,
        config.algorithm,
        config.optimizer,
        sampling=config.sampling,
        num_steps=config.run.num_steps,
        process_group=world.group,
        reference=reference,
        reduces_each=config.parallel.reduce_each_micro_batch,
    )


def sampling_params(config: Config, stop_ids: tuple[int, ...]) -> SamplingParams:
    """Returns the law that a run's training responses are drawn by."""
    return SamplingParams(stop_ids=stop_ids, seed=config.run.seed, **config.sampling.model_dump())


def reward_spec(config: Config) -> RewardSpec:
    """Returns what a run's responses are scored by."""
    rewards = config.rewards
    return RewardSpec(config.task.name, rewards.functions, rewards.weights, rewards.solved_at, config.task.options)


def master_dtype(config: Config) -> torch.dtype:
    """Returns the type of the weights that are trained: float32, unless the engine computes in float64."""
    return torch.float64 if resolve_dtype(config.run.dtype) == torch.float64 else torch.float32


def base_dtype(config: Config) -> torch.dtype:
    """Returns the type of all other weights: another one only where adapters alone are trained."""
    wanted = config.lora.base_dtype
    return master_dtype(config) if wanted is None else resolve_dtype(wanted)


def plan_policy(config: Config, shape: ModelConfig) -> Transformer:
    """Returns the policy as the configuration wants it trained, without memory: on the meta device."""
    with torch.device("meta"):
        policy = Transformer(shape, config.parallel.checkpoint_activations).to(base_dtype(config))
    if config.lora.rank:
        add_adapters(policy, config.lora, master_dtype(config))
    return policy


def build_policy(policy: Transformer, model: Model, device: torch.device, seed: int = 0) -> Transformer:
    """Gives a planned policy tensors of its own: the model's, and those that adapters begin with. Returns it.

    seed: of the adapters.
    """

    def start(name: str, shape: torch.Size) -> Tensor:
        return start_value(name, shape, seed) if is_of_adapter(name) else model.tensors[name]

    tensors = {name: start(name, t.shape).to(t.dtype, copy=True) for name, t in policy.state_dict().items()}
    policy.load_state_dict(tensors, assign=True)
    return policy.to(device)


def build_sharded_policy(
    policy: Transformer, model: Model, world: World, param_dtype: torch.dtype | None = None, seed: int = 0
) -> Transformer:
    """Gives a planned policy this rank's slices of them. Every rank calls it, and reads no more than its slices.

    param_dtype: see `shard`.
    """
    shard(policy, mesh_of(world), param_dtype)
    policy.to_empty(device=world.device)
    stored, shapes = model.tensors, {name: parameter.shape for name, parameter in policy.named_parameters()}
    assert isinstance(stored, StoredTensors)

    def start(name: str, rows: slice) -> Tensor:
        return start_value(name, shapes[name], seed)[rows] if is_of_adapter(name) else stored.rows(name, rows)

    fill(policy, start)
    return policy


def build_draft_model(drafter: StoredDrafter, device: torch.device) -> DraftModel:
    """Returns the copy of a drafter that is trained."""
    model = DraftModel(drafter.config).to(device)
    model.load_state_dict(drafter.tensors)
    return model


def build_spot_trainer(
    settings: DrafterSection,
    stored: StoredDrafter,
    model: DraftModel,
    target: PackedTransformer,
    seed: int,
    on_span: Callable[[Span], None],
) -> SpotTrainer:
    """Returns who trains the drafter in idle time.

    model: the copy to train.  target: the engine's policy.  seed: of the windows it draws; every rank has another.
    """
    preset = choose_preset(settings.preset, stored, preset_changes(settings))
    return SpotTrainer(
        DrafterTrainer(model, target, preset, settings.learning_rate, settings.clip_grad_norm),
        TrajectoryBuffer(settings.buffer_mib * 2**20, seed),
        settings.tokens_per_micro_step,
        settings.carry_longest,
        on_span,
        keeps_captured=settings.features == "captured",
        max_passes=settings.max_passes,
    )


def preset_changes(settings: DrafterSection) -> dict[str, Any]:
    """Returns the constants of a preset that the configuration sets."""
    names = ("unrolled_steps", "step_decay", "feature_weight", "distribution_weight")
    return {name: getattr(settings, name) for name in names}

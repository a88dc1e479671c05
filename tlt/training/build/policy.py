"""A run's configuration → policy, trainer, reward specification."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tlt.base.config.schema import Config
from tlt.base.types import resolve_dtype
from tlt.engine.build.model import Model, model_folder
from tlt.engine.equal_rows import EqualRows
from tlt.models.decoder import ModelConfig, Policy
from tlt.models.hf.weights import StoredTensors, stored_dtype
from tlt.models.lora import BaseOf, add_adapters, is_of_adapter, start_value
from tlt.models.new import new_target, new_transformer
from tlt.models.packed import layer_by_layer
from tlt.models.target import Target
from tlt.tasks.rewards.scoring import RewardSpec
from tlt.training.build.environment import environment_spec, gives_reward
from tlt.training.ranks.sharding import FullTensors, fill, mesh_of, shard
from tlt.training.ranks.world import World
from tlt.training.update.gradients import gradients_of
from tlt.training.update.update import PolicyTrainer


def build_policy_trainer(
    config: Config, model: Model, world: World, is_sharded: bool = False, target: Target | None = None
) -> PolicyTrainer:
    """target: the engine's copy, whose numbers the update takes; None: it computes its own."""

    def build() -> Policy:
        policy, seed = policy_on_meta(config, model.config), config.run.seed
        if not is_sharded:
            return build_policy(policy, model, world.device, seed)
        wanted = config.parallel.param_dtype
        param_dtype = None if wanted is None else resolve_dtype(wanted)
        return build_sharded_policy(policy, model, world, param_dtype, seed)

    policy = build()
    reference: Policy | BaseOf | EqualRows | None = None
    if config.algorithm.kl_coefficient > 0 and target is not None:
        reference = _rows_of(config, _copy_of_start(config, model, target), lambda: None)
    elif config.algorithm.kl_coefficient > 0:
        starts_from_base = config.lora.is_used and model.adapter is None
        reference = BaseOf(policy) if starts_from_base else build()
    return PolicyTrainer(
        policy,
        config.algorithm,
        config.optimizer,
        config.sampling,
        config.run.num_steps,
        gradients_of(policy, world.group, config.parallel.reduce_each_micro_batch),
        reference,
        rows=None if target is None else _rows_of(config, target, lambda: _load(target, policy)),
    )


def _rows_of(config: Config, target: Target, load: Callable[[], None]) -> EqualRows:
    return EqualRows(target, config.sampling.params(config.run.seed, ()), load)


def _load(target: Target, policy: Policy) -> None:
    target.load_parts(layer_by_layer(FullTensors(policy, target.dtype)), target.version)


def _copy_of_start(config: Config, model: Model, like: Target) -> Target:
    policy = build_policy(policy_on_meta(config, model.config), model, like.device, config.run.seed)
    target = new_target(model.config, like.dtype, like.device, equal_rows=True)
    _load(target, policy)
    return target


def reward_spec(config: Config) -> RewardSpec:
    rewards = config.rewards
    return RewardSpec(
        config.task.name,
        rewards.functions,
        rewards.weights,
        rewards.solved_at,
        config.task.options,
        gives_reward(config.environment),
        [*environment_spec(config.environment).factories.values()],
    )


def master_dtype(config: Config) -> torch.dtype:
    """Trained weights are float32, unless the engine computes in float64."""
    return torch.float64 if resolve_dtype(config.run.dtype) == torch.float64 else torch.float32


def saved_dtype(config: Config) -> torch.dtype:
    """The starting model's dtype, or float64 where the run computes in it."""
    trained = master_dtype(config)
    return trained if trained == torch.float64 else stored_dtype(model_folder(config))


def base_dtype(config: Config) -> torch.dtype:
    wanted = config.lora.base_dtype
    return master_dtype(config) if wanted is None else resolve_dtype(wanted)


def policy_on_meta(config: Config, shape: ModelConfig) -> Policy:
    """With its adapters, without memory; `build_policy` fills it."""
    with torch.device("meta"):
        policy = new_transformer(shape, base_dtype(config), config.parallel.checkpoint_activations)
    if config.lora.is_used:
        add_adapters(policy, config.lora, master_dtype(config))
    return policy


def build_policy(policy: Policy, model: Model, device: torch.device, seed: int = 0) -> Policy:
    def start(name: str, shape: torch.Size) -> Tensor:
        return _start_of_adapter(model, name, shape, seed) if is_of_adapter(name) else model.tensors[name]

    tensors = {name: start(name, t.shape).to(t.dtype, copy=True) for name, t in policy.state_dict().items()}
    policy.load_state_dict(tensors, assign=True)
    return policy.to(device)


def build_sharded_policy(
    policy: Policy, model: Model, world: World, param_dtype: torch.dtype | None = None, seed: int = 0
) -> Policy:
    """param_dtype: see `shard`."""
    shard(policy, mesh_of(world), param_dtype)
    policy.to_empty(device=world.device)
    policy.initialize_buffers(world.device)
    stored, shapes = model.tensors, {name: parameter.shape for name, parameter in policy.named_parameters()}
    assert isinstance(stored, StoredTensors)

    def start(name: str, rows: slice) -> Tensor:
        if is_of_adapter(name):
            return _start_of_adapter(model, name, shapes[name], seed)[rows]
        return stored.rows(name, rows)

    fill(policy, start)
    return policy


def _start_of_adapter(model: Model, name: str, shape: torch.Size, seed: int) -> Tensor:
    return start_value(name, shape, seed) if model.adapter is None else model.adapter.tensors[name]

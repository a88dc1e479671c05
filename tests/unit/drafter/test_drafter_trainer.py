"""Drafter training against its formulas; averaging, restoring, and the target left as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.lossless.helpers import CONFIG, VOCAB
from tests.unit.drafter.parts import (
    HASS,
    ONE_STEP,
    TARGET,
    make_batch,
    make_model,
    make_rollout,
)
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.drafter.training.buffer import TrajectoryBuffer
from tlt.drafter.training.losses import PRESETS
from tlt.drafter.training.spot import FeatureRecompute
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.models.hf.weights import content_hash
from tlt.models.packed import PackedTransformer


@pytest.mark.parametrize("largest_norm", [1e9, 0.05])
def test_a_training_step_moves_the_weights_as_plain_adamw_on_that_loss_does(largest_norm: float) -> None:
    model, reference = make_model(5), make_model(5)
    trainer = DrafterTrainer(model, TARGET, ONE_STEP, 1e-2, clip_grad_norm=largest_norm)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = DrafterTrainer(reference, TARGET, ONE_STEP)
    for seed in range(3):
        loss = losses.loss(make_batch(seed=seed))
        optimizer.zero_grad()
        loss.backward()
        grads = [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        for grad in grads:
            grad *= min(1.0, largest_norm * 10.0**seed / (norm + 1e-6))
        trainer.clip_grad_norm = largest_norm * 10.0**seed
        optimizer.step()
        assert trainer.step(make_batch(seed=seed)) == pytest.approx(loss.item(), abs=1e-10)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert trainer.num_tokens == 3 * (5 + 10 + 2)


class OneDevice(TorchDispatchMode):
    """Refuses what mixes devices, as a GPU does; numbers of the device `meta`, which has none, read as 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and tensors[0].is_meta:
            return 1
        if func not in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            devices = {tensor.device.type for tensor in tensors if tensor.dim()}
            assert len(devices) <= 1, f"{func} of {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("preset", "draft_vocab"),
    [
        ("eagle", None),
        ("hass", None),
        ("eagle3", VOCAB - 9),
        ("dflash-pace", None),
        ("dspark", VOCAB - 9),
    ],
)
def test_training_and_recomputing_mix_no_devices(preset: str, draft_vocab: int | None) -> None:
    config = replace(CONFIG, num_layers=4)
    with OneDevice():
        target = PackedTransformer(config, torch.float32, "meta")
        with torch.device("meta"):
            model = new_model(drafter_shape(config, PRESETS[preset].method, draft_vocab))
        trainer = DrafterTrainer(model, target, PRESETS[preset])
        buffer = TrajectoryBuffer(10**9)
        for length in (20, 30):
            buffer.add(make_rollout([1] * length, 4))
            recompute = FeatureRecompute(target, trainer.capture, buffer.trajectories[-1])
            while not recompute.advance(16):
                pass
        batch = buffer.sample(60, target.version)
        assert batch is not None
        assert batch.captured_NF.is_meta
        with torch.enable_grad():
            trainer.loss(batch).backward()
        assert all(p.grad is not None and p.grad.is_meta for p in trainer.parameters)
        shared = trainer.shared_tensors()
        assert {tensor.device.type for tensor in shared} == {"cpu", "meta"}, (
            "AdamW counts its steps on the CPU"
        )


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_raises_and_leaves_the_weights_alone(poison: float) -> None:
    trainer = DrafterTrainer(make_model(), TARGET, HASS)
    before = content_hash(trainer.model.state_dict())
    batch = make_batch()
    batch.captured_NF[4] = poison
    with pytest.raises(FloatingPointError, match="loss is"):
        trainer.step(batch)
    assert content_hash(trainer.model.state_dict()) == before


def test_shared_tensors_are_weights_moments_and_step_counts_so_that_their_mean_is_all_replicas() -> None:
    trainers = [DrafterTrainer(make_model(), TARGET, ONE_STEP, 1e-2) for _ in range(2)]
    for seed, trainer in ((0, trainers[0]), (1, trainers[0]), (7, trainers[1])):
        trainer.step(make_batch(seed=seed))

    def held(trainer: DrafterTrainer) -> list[Tensor]:
        states = [(p, trainer.optimizer.state[p]) for p in trainer.model.parameters()]
        return [t for p, s in states for t in (p.data, s["exp_avg"], s["exp_avg_sq"], s["step"])]

    wanted = [0.6 * a + 0.4 * b for a, b in zip(*map(held, trainers), strict=True)]
    for a, b in zip(*(trainer.shared_tensors() for trainer in trainers), strict=True):
        a.copy_(0.6 * a + 0.4 * b)  # as average_weighted does over ranks
        b.copy_(a)
    for trainer in trainers:
        assert all(torch.equal(a, b) for a, b in zip(held(trainer), wanted, strict=True))
    assert trainers[0].step(make_batch()) == trainers[1].step(make_batch())
    assert content_hash(trainers[0].model.state_dict()) == content_hash(trainers[1].model.state_dict())

"""Drafter training against its formulas; averaging, restoring, and the target left as it is (FIELD §2, 5,
9 and 10)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.lossless.helpers import CONFIG, VOCAB, pack
from tests.unit.drafter.parts import (
    HASS,
    ONE_STEP,
    TARGET,
    loss_of,
    make_batch,
    make_model,
    make_rollout,
    make_spot,
    randn,
    ready_buffer,
    unpack,
)
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.drafter.training.buffer import TrajectoryBuffer
from tlt.drafter.training.losses import PRESETS, draft_loss
from tlt.drafter.training.spot import FeatureRecompute
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.hf.weights import content_hash
from tlt.models.decoder import Transformer
from tlt.models.packed import PackedTransformer


def test_a_packed_batch_has_the_loss_and_the_gradient_of_its_sequences_alone() -> None:
    batch, model = make_batch(), make_model()
    parts = unpack(batch)
    packed = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    alone = sum(loss_of(model, part) * part.weight_M.sum() for part in parts) / batch.weight_M.sum()
    torch.testing.assert_close(alone, loss_of(model, batch), rtol=0, atol=1e-12)
    for found, expected in zip(packed, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_loss_is_its_formula_pair_by_pair() -> None:
    predicted, target, head = randn(5, 4, seed=1) * 2, randn(5, 4, seed=2), randn(7, 4, seed=3)
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    total = 0.0
    for m in (0, 2, 3):
        for p, t in zip(predicted[m].tolist(), target[m].tolist(), strict=True):
            total += 0.7 / 4 * (0.5 * (p - t) ** 2 if abs(p - t) < 1 else abs(p - t) - 0.5)
        q, wanted = (head @ predicted[m]).exp(), (head @ target[m]).exp()
        total -= 1.3 * float((wanted / wanted.sum() * (q / q.sum()).log()).sum())
    found = draft_loss(predicted, target, predicted @ head.T, (target @ head.T).softmax(-1), weight, ONE_STEP)
    assert found.item() == pytest.approx(total / 3, abs=1e-12)


def test_a_training_step_moves_the_weights_as_plain_adamw_on_that_loss_does() -> None:
    model, reference = make_model(5), make_model(5)
    trainer = DrafterTrainer(model, TARGET, ONE_STEP, 1e-2, clip_grad_norm=1e9)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(3):
        loss = loss_of(reference, make_batch(seed=seed))
        optimizer.zero_grad()
        loss.backward()
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


@pytest.mark.parametrize(("preset", "draft_vocab"), [("eagle", None), ("hass", None), ("eagle3", VOCAB - 9)])
def test_training_and_recomputing_mix_no_devices(preset: str, draft_vocab: int | None) -> None:
    config = replace(CONFIG, num_layers=4)
    with OneDevice():
        target = PackedTransformer(config, torch.float32, "meta")
        with torch.device("meta"):
            model = DraftModel(drafter_shape(config, PRESETS[preset].method, draft_vocab))
        trainer = DrafterTrainer(model, target, PRESETS[preset])
        buffer = TrajectoryBuffer(10**9)
        for length in (20, 30):
            buffer.add(make_rollout([1] * length, 4))
            recompute = FeatureRecompute(target, trainer.capture, buffer.trajectories[-1])
            while not recompute.advance(16):
                pass
        batch = buffer.sample(60)
        assert batch is not None
        assert batch.captured_NF.is_meta
        with torch.enable_grad():
            trainer.loss(batch).backward()
        assert all(p.grad is not None and p.grad.is_meta for p in trainer.parameters)
        shared = trainer.shared_tensors()
        assert {tensor.device.type for tensor in shared} == {"cpu", "meta"}, (
            "AdamW counts its steps on the CPU"
        )


def tensors_within(value: Any, name: str = "") -> dict[str, Tensor]:
    """Every tensor that an object holds, at any depth."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, list):
        items: Iterable[tuple[Any, Any]] = enumerate(value)
    elif hasattr(value, "__dict__"):
        items = vars(value).items()
    else:
        return {}
    return {k: v for key, child in items for k, v in tensors_within(child, f"{name}.{key}").items()}


@pytest.mark.parametrize("tied", [True, False])
def test_training_the_drafter_changes_no_tensor_of_the_target(tied: bool) -> None:
    policy = Transformer(replace(CONFIG, tie_embeddings=tied)).double().initialize(3, 0.3)
    target = pack(policy)
    held = tensors_within(target)
    assert len(held) > 15
    before, policy_before = content_hash(held), content_hash(policy.state_dict())
    spot = make_spot(ready_buffer(3, 60, with_features=False), target)
    drafter_before = content_hash(spot.trainer.model.state_dict())
    steps = iter(range(20))
    report = spot.run(lambda: next(steps, None) is None)
    assert report.num_tokens > 0
    assert content_hash(spot.trainer.model.state_dict()) != drafter_before
    assert content_hash(tensors_within(target)) == before
    assert content_hash(policy.state_dict()) == policy_before
    shared = {t.data_ptr() for t in held.values()}
    assert not shared & {t.data_ptr() for t in spot.trainer.model.state_dict().values()}


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_raises_and_leaves_the_weights_alone(poison: float) -> None:
    trainer = DrafterTrainer(make_model(), TARGET, HASS)
    before = content_hash(trainer.model.state_dict())
    batch = make_batch()
    batch.captured_NF[4] = poison
    with pytest.raises(FloatingPointError, match="loss is"):
        trainer.step(batch)
    assert content_hash(trainer.model.state_dict()) == before


def test_drafters_averaged_by_tokens_have_the_mean_weights_and_the_mean_adam_moments() -> None:
    """Two replicas that trained on different batches, and the step that follows, against AdamW written out
    by hand."""
    trainers = [DrafterTrainer(make_model(), TARGET, ONE_STEP, 1e-2, clip_grad_norm=1e9) for _ in range(2)]
    for seed in range(3):
        trainers[0].step(make_batch((9,), seed=seed))
    trainers[1].step(make_batch((6, 11, 3), seed=7))
    weights = [trainer.num_tokens / sum(t.num_tokens for t in trainers) for trainer in trainers]
    assert weights == [24 / 41, 17 / 41]

    def average(values: Sequence[Tensor]) -> Tensor:
        return weights[0] * values[0] + weights[1] * values[1]

    names = [name for name, _ in trainers[0].model.named_parameters()]
    parameters = [dict(t.model.named_parameters()) for t in trainers]
    states = [
        [t.optimizer.state[p[name]] for name in names] for t, p in zip(trainers, parameters, strict=True)
    ]
    mean = [average([p[name].detach() for p in parameters]) for name in names]
    first = [average([s[i]["exp_avg"] for s in states]) for i in range(len(names))]
    second = [average([s[i]["exp_avg_sq"] for s in states]) for i in range(len(names))]
    num_steps = weights[0] * 3 + weights[1] * 1

    for tensors in zip(
        *(t.shared_tensors() for t in trainers), strict=True
    ):  # as average_weighted does over ranks
        averaged = average(tensors)
        for tensor in tensors:
            tensor.copy_(averaged)

    batch, wanted = make_batch(seed=11), []
    grads = torch.autograd.grad(loss_of(trainers[0].model, batch), [parameters[0][name] for name in names])
    for p, m, v, g in zip(mean, first, second, grads, strict=True):
        m, v, t = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g, num_steps + 1
        wanted.append(p - 1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8))
    for trainer in trainers:
        trainer.step(batch)
        for found, expected in zip(trainer.model.parameters(), wanted, strict=True):
            torch.testing.assert_close(
                found.detach(), expected, rtol=0, atol=1e-6
            )  # the step count is float32


def test_a_replica_that_never_trained_shares_tensors_of_the_same_shapes() -> None:
    idle, busy = DrafterTrainer(make_model(), TARGET, HASS), DrafterTrainer(make_model(), TARGET, HASS)
    busy.step(make_batch())
    assert [t.shape for t in idle.shared_tensors()] == [t.shape for t in busy.shared_tensors()]
    assert idle.step(make_batch()) == pytest.approx(
        DrafterTrainer(make_model(), TARGET, HASS).step(make_batch()), abs=0
    )


def test_a_restored_trainer_goes_on_bit_for_bit() -> None:
    model = make_model()
    trainer = DrafterTrainer(model, TARGET, HASS)
    for seed in range(3):
        trainer.step(make_batch(seed=seed))
    restored = DrafterTrainer(make_model(seed=77), TARGET, HASS)
    with torch.no_grad():
        for name, tensor in restored.tensors().items():
            tensor.copy_(trainer.tensors()[name])
    for seed in range(3, 6):
        assert restored.step(make_batch(seed=seed)) == trainer.step(make_batch(seed=seed))
    assert content_hash(restored.model.state_dict()) == content_hash(model.state_dict())

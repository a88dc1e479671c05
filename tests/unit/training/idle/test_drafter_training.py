"""Updates of the drafter never fail in silence: every fault planted here is seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lossless.helpers import CONFIG, VOCAB, make_engine
from tests.unit.drafter.parts import POLICY
from tests.unit.drafter.training_parts import Parts, make_rollouts
from tlt.base.records import DrafterCheck
from tlt.base.strategy import Strategy
from tlt.base.types import Request, SamplingParams
from tlt.drafter.drafting.hybrid import HybridDrafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.models.hf.weights import content_hash
from tlt.speculation.tuner.tuner import FixedTuner
from tlt.training.idle.drafter_training import RankState

STALE = pytest.mark.parametrize(
    "stale", ["fc.weight", "layers.0.self_attn.o_proj.weight", "layers.0.post_attention_layernorm.weight"]
)
# in a step that measures acceptance, and in one that does not
EVERY_STEP = pytest.mark.parametrize(("check_every", "steps_before"), [(1, 0), (10, 1)])


def parts_after(check_every: int, steps_before: int) -> Parts:
    parts = Parts(check_every=check_every)
    for seed in range(steps_before):
        parts.step(seed)
    return parts


def listen(parts: Parts) -> list[str]:
    """Returns the list that the ranks' collectives are noted in from here on."""
    calls: list[str] = []

    def gather(value: Any) -> list[Any]:
        calls.append(type(value).__name__)
        return [value]

    parts.training.ranks = replace(parts.training.ranks, gather=gather)
    return calls


def test_a_trained_drafter_is_published_measured_and_stamped() -> None:
    parts = Parts()
    checks = [parts.step(seed) for seed in range(3)]
    assert [check.version for check in checks] == [1, 2, 3]
    assert all(check.training == "trained" for check in checks)
    assert all(0 < check.acceptance < 1 for check in checks)
    assert parts.step(micro_steps=0).training == "no idle time"
    assert parts.learned.version == 3


def test_a_check_tells_the_acceptance_of_the_drafter_that_was_in_service_before_the_training() -> None:
    parts = Parts()
    untrained = parts.measure(make_rollouts(), 1.0)
    check = parts.step()
    assert check.before == pytest.approx(untrained.accepted / untrained.num_positions)
    assert check.before != check.acceptance
    assert math.isnan(parts.step(micro_steps=0).before), "nothing was published"


@STALE
@EVERY_STEP
def test_a_publication_that_does_not_arrive_is_an_error(
    check_every: int, steps_before: int, stale: str
) -> None:
    """The engine's copy takes the version, but one tensor stays as it was."""
    parts = parts_after(check_every, steps_before)
    parts.trainer.optimizer.param_groups[0]["lr"] = 0.1
    before = parts.model.state_dict()[stale].clone()
    load = parts.learned.model.load
    parts.learned.model.load = lambda tensors, version: load({**tensors, stale: before}, version)
    version = steps_before + 1
    with pytest.raises(RuntimeError, match=f"version {version} did not arrive in rank 0's engine"):
        parts.step(steps_before)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape"])
def test_tensors_are_checked_by_name_both_ways_and_by_shape(fault: str) -> None:
    parts = Parts()
    tensors: dict[str, Tensor] = dict(parts.model.state_dict())
    if fault == "missing":
        del tensors["layers.0.mlp.down_proj.weight"]
    elif fault == "unexpected":
        tensors["embed_tokens.weight"] = torch.zeros(VOCAB, CONFIG.hidden_size)
    else:
        tensors["fc.weight"] = tensors["fc.weight"].T
    with pytest.raises(RuntimeError, match=r"tensor \S+ is"):
        parts.learned.load(tensors, 5)
    assert parts.learned.version == 0


@EVERY_STEP
def test_ranks_that_hold_different_drafters_are_an_error(check_every: int, steps_before: int) -> None:
    parts, other = parts_after(check_every, steps_before), Parts()
    with torch.no_grad():
        other.model.fc.weight[0, 0] += 1e-6
    parts.join(RankState("", 0, False), other.measure(make_rollouts(), 1.0, is_due=not steps_before))
    with pytest.raises(RuntimeError, match="rank 1 holds other weights"):
        parts.step(steps_before)


def is_measured(check: DrafterCheck) -> bool:
    assert math.isnan(check.acceptance) == math.isnan(check.retrieval)
    return not math.isnan(check.acceptance)


def test_acceptance_is_measured_every_so_many_steps_all_else_in_each_and_a_restart_keeps_count() -> None:
    """The ranks' collectives are the same in every step, whatever is measured."""
    parts, again = Parts(check_every=3), Parts(check_every=3)
    calls = listen(parts)

    def average(tensors: Sequence[Tensor], weight: float) -> float:
        calls.append("average")
        return weight

    assert parts.training.publisher is not None
    parts.training.publisher.average = average
    checks = [parts.step(seed) for seed in range(5)]
    assert [is_measured(check) for check in checks] == [True, False, False, True, False]
    assert [check.version for check in checks] == [1, 2, 3, 4, 5]
    assert all(check.training == "trained" for check in checks)
    assert calls == ["RankState", "average", "Tally"] * 5
    again.training.restore(parts.training.counters(), parts.training.own_counters())
    assert again.training.counters() == parts.training.counters()
    assert [is_measured(again.step(seed)) for seed in range(3)] == [False, True, False]


def poison(parts: Parts, where: str) -> None:
    """Lets the next optimizer step fail with its loss, or leave a weight that is NaN."""
    step = parts.trainer.step

    def broken(batch: Any) -> float:
        if where == "loss":
            raise FloatingPointError("the loss is nan")
        loss = step(batch)
        with torch.no_grad():
            parts.model.fc.weight[3, 5] = math.nan
        parts.trainer.step = lambda batch: 0.0
        return loss

    parts.trainer.step = broken


@pytest.mark.parametrize("where", ["loss", "weights"])
@pytest.mark.parametrize("check_every", [1, 3])
def test_a_drafter_that_turns_nan_is_undone_and_trained_again(check_every: int, where: str) -> None:
    parts = parts_after(check_every, 1)
    weights, step = content_hash(parts.model.state_dict()), parts.trainer.step
    moments = [tensor.clone() for tensor in parts.trainer.shared_tensors()]
    poison(parts, where)
    check = parts.step(1)
    assert (check.is_undone, check.version) == (True, 1)
    assert math.isfinite(check.acceptance) == (check_every == 1), "of the version that the engine still has"
    assert content_hash(parts.model.state_dict()) == weights
    assert all(torch.equal(a, b) for a, b in zip(parts.trainer.shared_tensors(), moments, strict=True))
    parts.trainer.step = step
    check = parts.step(2)
    assert (check.training, check.version) == ("trained", 2)


def test_a_failure_on_one_rank_undoes_the_update_of_all() -> None:
    parts = Parts()
    before = content_hash(parts.model.state_dict())
    parts.join(RankState("the loss is inf", 0, False))
    assert parts.step().training == "undone: the loss is inf"
    assert content_hash(parts.model.state_dict()) == before


def test_an_interrupted_step_leaves_no_trace() -> None:
    parts = Parts()
    parts.step(0)
    before = content_hash(parts.model.state_dict())
    parts.train()
    assert content_hash(parts.model.state_dict()) != before
    parts.training.abandon()
    assert content_hash(parts.model.state_dict()) == before


@pytest.mark.parametrize("speculation", ["learned:3x1x3", "learned:3x2x5", "hybrid:3x1x3"])
def test_a_drafter_whose_outputs_are_not_finite_changes_no_token(speculation: str) -> None:
    requests = [Request("p", i, (3, 5, 8), SamplingParams(max_tokens=30)) for i in range(3)]
    texts = []
    for is_broken in (False, True):
        engine = make_engine(POLICY, FixedTuner(Strategy.parse(speculation)))
        assert isinstance(engine.drafter, HybridDrafter)
        if is_broken:
            tensors = new_model(drafter_shape(CONFIG)).state_dict()
            engine.drafter.learned.load({name: tensor * math.nan for name, tensor in tensors.items()}, 1)
        texts.append({(r.sample_index, r.token_ids) for r in engine.generate(requests)})
    assert texts[0] == texts[1]


def test_what_is_undone_leaves_no_gradient_to_the_next_training() -> None:
    parts = parts_after(1, 1)
    publisher = parts.training.publisher
    assert publisher is not None
    for parameter in parts.trainer.parameters:
        parameter.grad = torch.full_like(parameter, math.nan)
    publisher.undo(1)
    assert all(parameter.grad is None for parameter in parts.trainer.parameters)

"""Offline training of a drafter: what its summary says of the drafter, weak ones included."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.lossless.helpers import CONFIG, make_policy, pack
from tests.unit.drafter.parts import POLICY, TARGET
from tests.unit.drafter.training_parts import make_rollouts
from tlt.base.types import Rollout
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.drafter.training.losses import PRESETS
from tlt.drafter.training.offline import (
    WEAK_ACCEPTANCE,
    OfflineSettings,
    OfflineSummary,
    _warm_up_and_down,
    measure_acceptance,
    train_offline,
)
from tlt.drafter.vocabulary import mask_token
from tlt.models.packed import PackedTransformer

SETTINGS = OfflineSettings(epochs=0.1, learning_rate=1e-3, tokens_per_step=64, seed=0)


def make_sharp_target() -> PackedTransformer:
    """A target that is nearly sure of every next token, as trained models are."""
    policy = make_policy()
    with torch.no_grad():
        policy.model.norm.weight.mul_(12.0)
    return pack(policy)


def train(
    target: PackedTransformer,
    rollouts: list[Rollout],
    on_progress: Callable[[float, float | None], None] = lambda share, loss: None,
) -> OfflineSummary:
    model = new_model(drafter_shape(CONFIG)).initialize(0)
    return train_offline(model, target, PRESETS["hass"], rollouts, SETTINGS, on_progress)


def test_whoever_waits_is_told_how_far_reading_and_training_are() -> None:
    told: list[tuple[float, float | None]] = []
    train(pack(POLICY), make_rollouts(4, 20), lambda *one: told.append(one))
    reading, training = (
        [share for share, loss in told if (loss is None) is reads] for reads in (True, False)
    )
    assert reading == pytest.approx([0, 0.25, 0.5, 0.75], abs=0.1)
    assert [loss is None for _, loss in told] == [True] * 4 + [False] * len(training)
    assert training == sorted(training)
    assert training[-1] >= 1


def test_only_a_drafter_that_did_not_learn_its_target_is_called_weak() -> None:
    weak, learned = (train(target, make_rollouts(4, 30)) for target in (make_sharp_target(), TARGET))
    assert weak.acceptance is not None
    assert learned.acceptance is not None
    assert 0 < weak.acceptance < WEAK_ACCEPTANCE < learned.acceptance
    assert weak.warning is not None
    assert weak.warning.startswith("this drafter is weak: at most ")
    assert "\n" not in weak.warning
    assert learned.warning is None


def test_responses_to_prompts_of_one_token_train_a_drafter_that_is_not_measured() -> None:
    summary = train(TARGET, [replace(one, prompt_ids=one.prompt_ids[:1]) for one in make_rollouts(2, 12)])
    assert (summary.acceptance, summary.warning) == (None, None)
    assert summary.tokens > 0


def test_masks_look_like_a_sound_token_that_responses_do_not_use() -> None:
    embedding_VE = torch.ones(6, 4)
    counts_V = torch.tensor([5.0, 0.0, 3.0, 0.0, 0.0, 0.0])
    assert mask_token(counts_V, embedding_VE) == 5
    embedding_VE[5] = 0.0
    embedding_VE[4, 1] = float("nan")
    assert mask_token(counts_V, embedding_VE) == 3
    assert mask_token(torch.tensor([5.0, 2.0, 3.0, 2.0, 0.0, 0.0]), embedding_VE) == 3


def test_a_drafter_whose_outputs_are_not_finite_is_an_error() -> None:
    rollouts = make_rollouts(2, 12)
    model = new_model(drafter_shape(CONFIG)).initialize(0)
    with torch.no_grad():
        model.fc.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        measure_acceptance(model, TARGET, rollouts, 1.0, random.Random(0))


def test_the_learning_rate_warms_up_and_then_falls_to_nearly_nothing() -> None:
    rates = [_warm_up_and_down(step / 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[5:52] == [1.0] * 47
    assert rates[75] == pytest.approx(0.52)
    assert rates[100] == pytest.approx(0.02)
    assert rates == sorted(rates[:5]) + rates[5:52] + sorted(rates[52:], reverse=True)

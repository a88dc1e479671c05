"""A drafter in training reaches engines that generate: when it is taken up, and when it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.lossless.helpers import CONFIG
from tests.unit.phase_parts import (
    PARAMS,
    make_coordinators,
    make_engine,
    make_model,
    make_phase,
    make_problems,
    make_side,
    make_watch,
)
from tlt.distributed.mailbox import Mailbox
from tlt.drafter.drafting.learned import LearnedDrafter
from tlt.drafter.model import DraftModel
from tlt.drafter.training.buffer import TrajectoryBuffer
from tlt.drafter.training.losses import PRESETS
from tlt.drafter.training.spot import SpotTrainer
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.models.attention import PackedCausal
from tlt.training.rollout.drafter_side import DrafterRefresh, connect_refresh
from tlt.training.rollout.result import PhaseResult
from tlt.types import Request, Strategy


def predicts_like(learned: LearnedDrafter, model: DraftModel) -> bool:
    inputs, attend = torch.randn(2, 5, CONFIG.hidden_size, dtype=torch.float64), PackedCausal(CONFIG, [5])
    with torch.no_grad():
        found, wanted = (m.forward(*inputs, attend.positions(), attend) for m in (learned.model, model))
    return torch.allclose(found, wanted, rtol=0, atol=1e-9)


def make_requests() -> list[Request]:
    return [Request(f"p{index}", 0, (3, 4, 5 + index), replace(PARAMS, max_tokens=20 + 8 * index)) for index in range(4)]


def test_a_drafter_loaded_between_two_engine_steps_drafts_as_if_it_had_always_been_there() -> None:
    """Its own cache is the old weights' work: had it stayed, the drafts would be others."""
    requests = make_requests()
    plain, _ = make_engine(strategy=Strategy.OFF)
    expected = {rollout.problem_id: rollout.token_ids for rollout in plain.generate(requests)}
    always, _ = make_engine(seed=3)
    switched, learned = make_engine(seed=2)
    found: dict[str, tuple[int, ...]] = {}
    drafts: list[dict[tuple[int, ...], list[int]]] = []
    for engine in (always, switched):
        engine.add(requests)
        trees: dict[tuple[int, ...], list[int]] = {}
        propose = engine.drafter.propose

        def watched(context: Any, *args: Any, propose: Any = propose, trees: dict[Any, Any] = trees) -> Any:
            proposal = propose(context, *args)
            rows = zip(context.tokens, proposal.tree.tokens_BN, strict=True)
            trees |= {tuple(row): drafted.tolist() for row, drafted in rows}
            return proposal

        engine.drafter.propose = watched
        for step in range(10**6):
            if engine.is_idle:
                break
            found |= {finished.rollout.problem_id: finished.rollout.token_ids for finished in engine.step()}
            if engine is switched and step == 4:
                learned.load(make_model(3).state_dict(), 8)
                trees.clear()
        assert found == expected, "tokens do not depend on the drafter"
        drafts.append(trees)
    common = drafts[0].keys() & drafts[1].keys()
    assert len(common) > 10
    assert all(drafts[0][tokens] == drafts[1][tokens] for tokens in common)


def run_with_refresh(
    is_published: bool, rollout: str = "rollout 0", version: int = 7, fault: float = 0.0
) -> tuple[PhaseResult, LearnedDrafter]:
    """A replica that generates alone, and an idle one that may have published its drafter, with a fault added to a weight."""
    engine, learned = make_engine()
    store = HashStore()
    refresh = DrafterRefresh(Mailbox(store), learned, seconds=1e-9)
    spot = SpotTrainer(DrafterTrainer(make_model(2), engine.model, PRESETS["hass"]), TrajectoryBuffer(10**6), 48)
    if is_published:
        _, other = make_engine()
        other.model.version = version
        sender = DrafterRefresh(Mailbox(store), other, seconds=1e-9)
        sender.begin(rollout)
        model = make_model(3)
        with torch.no_grad():
            model.fc.weight[2, 1] += fault
        sender.publish(model)
    (coordinator,) = make_coordinators(1)
    drafter = make_side(spot, learned, make_watch(engine, learned, spot), refresh)
    problems = make_problems(6)
    return make_phase(engine, coordinator).run(problems, 2, PARAMS, "rollout", 0, drafter), learned


def test_a_published_drafter_is_taken_up_once_and_changes_no_token() -> None:
    plain, untouched = run_with_refresh(is_published=False)
    refreshed, learned = run_with_refresh(is_published=True)
    assert [report.num_refreshes for report in plain.replicas] == [0]
    assert [report.num_refreshes for report in refreshed.replicas] == [1]
    assert [rollout.token_ids for rollout in refreshed.rollouts] == [rollout.token_ids for rollout in plain.rollouts]
    assert (untouched.version, learned.version) == (8, 9), "the average comes after what was taken up"
    assert predicts_like(learned, make_model(2))


@pytest.mark.parametrize("rollout", ["rollout 1", "rollout 00", "rollout", "evaluation 0"])
def test_a_drafter_published_in_another_rollout_is_not_taken_up(rollout: str) -> None:
    """Though the engine had the same version then: that rollout's update was undone."""
    result, learned = run_with_refresh(is_published=True, rollout=rollout)
    assert result.replicas[0].num_refreshes == 0
    assert learned.version == 8, "the average alone"


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_drafter_that_is_not_finite_is_not_sent(fault: float) -> None:
    result, learned = run_with_refresh(is_published=True, fault=fault)
    assert result.replicas[0].num_refreshes == 0
    assert learned.version == 8, "the average alone"


def test_runs_side_by_side_have_mailboxes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    monkeypatch.setattr("tlt.training.rollout.drafter_side.connect_mailbox", lambda store, name: names.append(name))
    for folder in ("a", "b"):
        settings = SimpleNamespace(refresh_during_rollout=True, refresh_seconds=1.0)
        world: Any = SimpleNamespace(store=None, group=object(), world_size=2)
        assert connect_refresh(settings, world, Path("runs") / folder, learned=None) is not None
    assert len(set(names)) == 2


def test_after_the_rollout_all_replicas_have_the_average_under_one_version_above_all_others() -> None:
    """This replica took up a drafter twice (9), another three times (10), a third trained."""
    engine, learned = make_engine()
    spot = SpotTrainer(DrafterTrainer(make_model(2), engine.model, PRESETS["hass"]), TrajectoryBuffer(10**6), 48)
    (coordinator,) = make_coordinators(1)
    average = make_model(5)

    def average_weighted(tensors: Sequence[torch.Tensor], weight: float) -> float:
        assert weight == 0, "this replica did not train"
        spot.trainer.model.load_state_dict(average.state_dict())
        return 9.0

    drafter = make_side(spot, learned, make_watch(engine, learned, spot, average_weighted, others=(10, 7)))
    learned.load(make_model(4).state_dict(), 9)
    result = make_phase(engine, coordinator).run(make_problems(2), 2, PARAMS, "rollout", 0, drafter)
    assert result.check is not None
    assert (learned.version, result.check.version) == (11, 11)
    assert predicts_like(learned, average)
    assert len(spot.buffer) == 4, "and the longest responses for the next step"
    assert spot.step_seconds == result.seconds

"""What an engine does with a drafter that it is given: amid a rollout, and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.lossless.helpers import CONFIG
from tests.unit.training.rollout.phase_parts import (
    PARAMS,
    make_engine,
    make_model,
    make_phase,
    make_problems,
    make_queues,
    make_training,
)
from tlt.base.strategy import Strategy
from tlt.base.types import Request
from tlt.drafter.drafting.learned.drafter import LearnedDrafter
from tlt.drafter.model import DraftModel
from tlt.drafter.training.buffer import TrajectoryBuffer
from tlt.drafter.training.losses import PRESETS
from tlt.drafter.training.spot import SpotTrainer
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.models.attention import PackedCausal
from tlt.training.idle.work import IdleWork


def predicts_like(learned: LearnedDrafter, model: DraftModel) -> bool:
    inputs, attend = torch.randn(2, 5, CONFIG.hidden_size, dtype=torch.float64), PackedCausal(CONFIG, [5])
    with torch.no_grad():
        found, wanted = (m.forward(*inputs, attend.positions(), attend) for m in (learned.model, model))
    return torch.allclose(found, wanted, rtol=0, atol=1e-9)


def make_requests() -> list[Request]:
    return [
        Request(f"p{index}", 0, (3, 4, 5 + index), replace(PARAMS, max_tokens=20 + 8 * index))
        for index in range(4)
    ]


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


def test_after_the_rollout_all_replicas_have_the_average_under_one_version_above_all_others() -> None:
    """Versions of the replicas differ: 9 here, 10 and 7 elsewhere."""
    engine, learned = make_engine()
    spot = SpotTrainer(
        DrafterTrainer(make_model(2), engine.target, PRESETS["hass"]), TrajectoryBuffer(10**6), 48
    )
    (queue,) = make_queues(1)
    average = make_model(5)

    def average_weighted(tensors: Sequence[torch.Tensor], weight: float) -> float:
        assert weight == 0, "this replica did not train"
        spot.trainer.model.load_state_dict(average.state_dict())
        return 9.0

    drafter = make_training(spot, learned, engine.target, average_weighted, others=(10, 7))
    learned.load(make_model(4).state_dict(), 9)
    idle_work = IdleWork(training=drafter)
    result = make_phase(engine, queue).run(make_problems(2), 2, PARAMS, "rollout", 0, idle_work)
    assert result.check is not None
    assert (learned.version, result.check.version) == (11, 11)
    assert predicts_like(learned, average)
    assert len(spot.buffer) == 4, "and the longest responses for the next step"
    assert spot.step_seconds == result.seconds

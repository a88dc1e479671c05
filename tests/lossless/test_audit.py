"""The audit on our own engine: it passes whatever the speculation, and each fault planted in it by hand is
found.

The referee is transformers' own model, read from a checkpoint folder. Verdicts have a false-positive rate
of 1e-4 each; the seeds are fixed, so a verdict here never changes by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.lossless.faults import PlantedFault, Verify
from tests.lossless.helpers import PARAMS, STOP, VOCAB, Switching, make_engine, make_policy, to_transformers
from tlt.apps.audit.referee import Referee
from tlt.apps.audit.report import AuditReport
from tlt.apps.audit.verdict import Auditor
from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Request, SamplingParams, Verdict
from tlt.engine.own import tree_forward
from tlt.engine.own.engine import RolloutEngine
from tlt.speculation.law.params import Law
from tlt.speculation.law.verify import verify
from tlt.speculation.tuner.protocol import StrategyTuner

MAX_TOKENS = 40
CHAIN, TREE = Strategy("learned", 4, 1, 4), Strategy("learned", 3, 2, 5)
TUNERS: dict[str, Callable[[], StrategyTuner | None]] = {
    "off": lambda: None,
    "chain": lambda: Switching([CHAIN], 0),
    "tree": lambda: Switching([TREE], 0),
    "switching": lambda: Switching([Strategy.OFF, CHAIN, TREE], 0),
}


@pytest.fixture(scope="module")
def referee(tmp_path_factory: pytest.TempPathFactory) -> Referee:
    folder = tmp_path_factory.mktemp("audit") / "model"
    to_transformers(make_policy()).save_pretrained(folder)
    return Referee(folder, torch.float64)


def audit(
    referee: Referee,
    engine: RolloutEngine,
    engine_params: SamplingParams,
    num_responses: int,
    told: SamplingParams | None = None,
) -> AuditReport:
    """Judges the engine as if it had been told `told` (None: what it was told)."""
    params = replace(engine_params, max_tokens=MAX_TOKENS, stop_ids=(STOP,))
    requests = [Request(f"p{i}", 0, (i % VOCAB, 3 * i % VOCAB, 11), params) for i in range(num_responses)]
    order = {request.problem_id: index for index, request in enumerate(requests)}
    auditor = Auditor(replace(told or params, stop_ids=(STOP,)), VOCAB, referee.window, limit=MAX_TOKENS)
    rollouts = sorted(engine.generate(requests), key=lambda rollout: order[rollout.problem_id])
    return auditor.judge("engine", rollouts, referee)


@pytest.mark.parametrize(
    ("mode", "params"),
    [
        *(("switching", params) for params in PARAMS),
        *(pytest.param(mode, PARAMS[-1], marks=pytest.mark.slow) for mode in ("off", "chain", "tree")),
    ],
    ids=lambda p: p if isinstance(p, str) else f"T{p.temperature:g}-k{p.top_k}-p{p.top_p:g}-m{p.min_p:g}",
)
def test_our_engine_passes_in_every_mode_under_every_setting(
    mode: str, params: SamplingParams, referee: Referee
) -> None:
    engine = make_engine(make_policy(), TUNERS[mode](), dtype=torch.float32)
    report = audit(referee, engine, params, num_responses=30)
    assert report.reasons == ()
    assert report.logprob_gap is not None
    assert report.logprob_gap < 1e-3  # what the default tolerance supposes of a float32 engine


def with_fault(fault: Verify, monkeypatch: pytest.MonkeyPatch) -> RolloutEngine:
    monkeypatch.setattr(tree_forward, "verify", fault)
    return make_engine(make_policy(), Switching([TREE], 0), "random", dtype=torch.float32, max_batch_size=64)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(PARAMS[1], id="sampled"),
        pytest.param(PARAMS[3], id="top-k", marks=pytest.mark.slow),
        pytest.param(PARAMS[0], id="greedy"),
    ],
)
def test_a_rejected_draft_accepted_now_and_then_is_found(
    params: SamplingParams, referee: Referee, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random drafter's guesses are nearly always rejected, so about 1 token in 100 is any token at all; 3
    where they are rare and not impossible. At 1 in 100 there, test_verdict.py states the number of tokens."""
    is_plain = params.temperature > 0 and not params.truncates
    fault = PlantedFault(0.03 if is_plain else 0.01)
    report = audit(referee, with_fault(fault, monkeypatch), params, num_responses=400 if is_plain else 150)
    assert fault.num_planted > 20
    assert report.is_convicted
    if is_plain:  # the fault's tokens are rare, not impossible: only their number tells
        assert report.tokens_for_power["as observed"] is not None
        assert report.detected_at_token is not None


def test_another_temperature_than_told_is_found(referee: Referee) -> None:
    engine = make_engine(make_policy(), Switching([CHAIN], 0), dtype=torch.float32)
    report = audit(
        referee, engine, SamplingParams(temperature=0.8), 100, told=SamplingParams(temperature=1.0)
    )
    assert report.is_convicted
    assert report.surprise is not None
    assert report.surprise.low > 0  # too sharp


def test_truncation_forgotten_is_found(referee: Referee) -> None:
    engine = make_engine(make_policy(), Switching([CHAIN], 0), dtype=torch.float32)
    report = audit(referee, engine, SamplingParams(), 20, told=SamplingParams(top_p=0.9))
    assert report.num_impossible > 0
    assert report.offenders[0].p == 0.0


def test_a_stop_token_suppressed_by_the_engine_is_found(
    referee: Referee, monkeypatch: pytest.MonkeyPatch
) -> None:
    def suppressing(tree: DraftTree, logits_BNV: Tensor, law: Law) -> list[Verdict]:
        logits_BNV = logits_BNV.clone()
        logits_BNV[..., STOP] -= 1.5
        return verify(tree, logits_BNV, law)

    report = audit(referee, with_fault(suppressing, monkeypatch), SamplingParams(), num_responses=200)
    assert report.is_convicted
    assert report.best_bet is not None
    assert report.best_bet.startswith("odds of stop 0.")

"""What drafters learn of their own guesses: confidences, the coupling temperature, and references."""

from __future__ import annotations

import pytest
import torch

from tests.unit.drafter.parts import CONFIG, MODEL, POLICY, make_drafter, make_requests, randn
from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Verdict
from tlt.drafter.drafting.learned.calibration import Calibration, TauSearch
from tlt.drafter.drafting.learned.drafter import LearnedDrafter
from tlt.drafter.forms import pack_drafter
from tlt.engine.own.engine import RolloutEngine
from tlt.models.packed import PackedTransformer
from tlt.speculation.tuner.protocol import ReferenceDraft
from tlt.speculation.tuner.tuner import FixedTuner

CPU = torch.device("cpu")
RAW = torch.tensor([-50, -5, -3.5, -2.6, -2, -1.4, -1, -0.8, -0.5, -0.4, -0.2, -0.15, -0.07, -0.03, -0.01])
"""A raw confidence of each bin."""


def test_a_candidates_chance_is_near_its_raw_confidence_until_verdicts_are_known() -> None:
    chances_F = Calibration(CPU).estimate(0, RAW[None, :, None])[1][0, :, 0]
    assert (chances_F.diff() > 0).all()
    assert (chances_F.exp() - RAW.exp()).abs().max() < 0.07


def test_levels_ranks_and_confidences_are_told_apart_and_late_ones_count_together() -> None:
    calibration = Calibration(CPU)
    raw_1FW = RAW[None, :, None].repeat(1, 1, 10)
    cells = [calibration.estimate(level, raw_1FW)[0][0] for level in range(12)]
    firsts = [next(k for k, other in enumerate(cells) if torch.equal(one, other)) for one in cells]
    assert firsts == [0, 1, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8]
    ranks = cells[0].T.tolist()
    assert ranks[7] == ranks[8] == ranks[9]
    different = [cell for level in sorted({*firsts}) for rank in cells[level].T.tolist()[:8] for cell in rank]
    assert sorted(different) == list(range(len(calibration.seen)))


def test_a_candidate_is_judged_where_its_parent_was_accepted() -> None:
    """root ─┬─ 5 ─┬─ 7 ─ 9      the target says 5, 8, 3
    │     └─ 8 ─┬─ 4
    │           └─ 2 (does not count)
    └─ 6 ─ 8
    """
    tree = DraftTree(
        torch.tensor([[1, 5, 6, 7, 8, 8, 9, 4, 2, 0]]), torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 4, 4, -1]])
    )
    cells = torch.tensor([[10, 11, 12, 13, 14, 15, 16, Calibration.UNUSED, 17]])
    calibration, before = Calibration(CPU), Calibration(CPU)
    verdict = Verdict((5, 8, 3), 2, (0, 1, 4), (0.0,) * 3)
    num = -(-256 // 5)  # of five judged candidates each, until the device's table is refreshed
    for _ in range(num):
        assert torch.equal(calibration.table, before.table)
        calibration.observe(calibration.note(tree, cells), [verdict])
    judged = {
        cell: n - before.seen[cell] for cell, n in enumerate(calibration.seen) if n != before.seen[cell]
    }
    right = {cell: n - calibration.prior[cell] * 8 for cell, n in enumerate(calibration.accepted)}
    assert judged == dict.fromkeys([10, 11, 12, 13, 16], float(num))
    assert {cell for cell, n in right.items() if n > 1} == {10, 13}
    assert right[10] == right[13] == pytest.approx(num)
    for cell, accepted in ((10, num), (11, 0)):
        chance = (8 * calibration.prior[cell] + accepted) / (8 + num)
        assert calibration.table[cell].exp().item() == pytest.approx(chance)


def test_the_verdicts_of_an_engine_teach_its_drafter() -> None:
    engine = RolloutEngine(
        PackedTransformer(CONFIG, torch.float64),
        max_batch_size=3,
        tuner=FixedTuner(Strategy("learned", 3, 2, 6)),
    )
    engine.load_policy(dict(POLICY.named_parameters()))
    drafter = LearnedDrafter(pack_drafter(MODEL.config, MODEL.state_dict(), torch.float64), engine.target, 3)
    assert drafter.calibration is not None
    before = sum(drafter.calibration.seen)
    engine.load_drafter(drafter)
    list(engine.generate(make_requests()))
    assert sum(drafter.calibration.seen) > before + engine.stats.num_steps, (
        "each judges at least one candidate"
    )
    assert drafter.tau_search.num_seen > engine.stats.num_steps // TauSearch.EVERY


def test_one_in_eight_proposals_says_what_each_tau_would_have_drafted_first() -> None:
    search, fixed, logits_BV, noise_BV = TauSearch(), TauSearch(0.6), randn(3, 20), randn(3, 20, seed=1)
    token_ids_V = torch.arange(20) * 2
    for number in range(1, 17):
        assert search.judges_next() == (number % 8 == 0)
        assert not fixed.judges_next()
    guesses_BK = search.guess(logits_BV, noise_BV, token_ids_V)
    for tau, guesses_B in zip(TauSearch.CANDIDATES, guesses_BK.T, strict=True):
        assert guesses_B.tolist() == (2 * (logits_BV + tau * noise_BV).argmax(-1)).tolist()


def test_a_calibration_that_ages_moves_halfway_back_to_its_prior_weight_at_the_same_rate() -> None:
    calibration = Calibration(torch.device("cpu"))
    seen, accepted = calibration.seen[7], calibration.accepted[7]
    calibration.seen[7], calibration.accepted[7] = seen + 100, accepted + 30
    calibration.age()
    assert calibration.seen[7] == pytest.approx(seen + 50)
    assert calibration.accepted[7] == pytest.approx(accepted + 15)
    assert calibration.table[7].item() == pytest.approx(
        torch.tensor((accepted + 15) / (seen + 50)).log().item()
    )


def test_new_weights_of_a_drafter_age_what_is_known_of_the_old_ones() -> None:
    drafter = make_drafter()
    drafter.calibration = Calibration(torch.device("cpu"))
    before = drafter.calibration.seen[7]
    drafter.calibration.seen[7] = before + 100
    drafter.load(MODEL.state_dict(), 1)
    assert drafter.calibration.seen[7] == pytest.approx(before + 50)


@pytest.mark.parametrize(("lead", "takes_over"), [(5, False), (15, True)])
def test_another_tau_takes_over_once_its_lead_is_beyond_chance(lead: int, takes_over: bool) -> None:
    """Of 400 verdicts 350 are hits of the current tau: a standard error is near the root of 100 - lead."""
    search = TauSearch()
    other = TauSearch.CANDIDATES.index(0.45)
    current = TauSearch.CANDIDATES.index(TauSearch.START)
    guesses = torch.zeros(len(TauSearch.CANDIDATES), 400, dtype=torch.int64)
    guesses[current, :350] = guesses[other, : 350 + lead] = 1
    search.observe(guesses.T, [1] * 400)
    assert search.tau == (0.45 if takes_over else TauSearch.START)


def test_a_references_expected_tokens_are_the_sum_of_its_chances() -> None:
    reference = ReferenceDraft(0.8, 5)
    for depth in (1, 3, 5, 9):
        assert reference.expected(depth) == pytest.approx(sum(0.8**k for k in range(1, min(depth, 5) + 1)))

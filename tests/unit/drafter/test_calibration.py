"""What drafters learn of their own guesses: confidences, the coupling temperature, and references."""

from __future__ import annotations

import pytest
import torch

from tests.unit.drafter.parts import MODEL, make_drafter
from tlt.drafter.drafting.learned.calibration import Calibration, TauSearch
from tlt.speculation.tuner.protocol import ReferenceDraft


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
    search.observe(guesses, [1] * 400)
    assert search.tau == (0.45 if takes_over else TauSearch.START)


def test_a_references_expected_tokens_are_the_sum_of_its_chances() -> None:
    reference = ReferenceDraft(0.8, 5)
    for depth in (1, 3, 5, 9):
        assert reference.expected(depth) == pytest.approx(sum(0.8**k for k in range(1, min(depth, 5) + 1)))

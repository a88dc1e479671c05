"""How many tokens a verdict needs, where the answer is known."""

from __future__ import annotations

import torch

from tlt.apps.audit.estimates import tokens_for_power


def test_power_is_none_when_no_bet_grows() -> None:
    assert tokens_for_power(torch.full((5, 3), -0.1, dtype=torch.float64), [10] * 5, 9.2) is None


def test_power_counts_tokens_until_the_threshold() -> None:
    """One bet of one that gains 1 nat per response of 10 tokens needs 10 responses for 9.2 nats."""
    assert tokens_for_power(torch.ones(5, 1, dtype=torch.float64), [10] * 5, 9.2) == 100

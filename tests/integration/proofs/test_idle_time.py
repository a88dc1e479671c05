"""Idle time is spent on drafting ahead or on training, as it pays: a whole run whose clock decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_run import PATIENCE, records, same_weights, train, what_the_law_fixes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE)]


def test_whatever_idle_time_is_spent_on_the_run_is_the_same(workspace: Path) -> None:
    fixed = train(workspace, "speculating", "--rollout.speculation", "4x1x4", "--evaluation.every", "1")
    follows = ("--rollout.speculation", "ahead+hybrid:64x1x64", "--rollout.ahead", "adaptive")
    adaptive = train(workspace, "ahead-adaptive", *follows)
    assert what_the_law_fixes(adaptive) == what_the_law_fixes(fixed)
    assert same_weights(adaptive, fixed)
    for record in records(adaptive):
        assert record.idle.gain.keys() == record.idle.cost.keys() == {"ahead", "train"}
    used = {use for record in records(adaptive) for use in record.idle.seconds_by_use}
    assert used & {"ahead", "train"}

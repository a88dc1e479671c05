"""The sums of a micro-batch's gradients, without ranks."""

from __future__ import annotations

from typing import Any

import torch

from tlt.rl.gradients import Sharded


def test_a_parameter_that_no_loss_reached_gets_a_gradient_of_0_and_is_stepped_like_any_other() -> None:
    """Its momentum and its weight decay go on, as where every rank holds all parameters."""
    reached, missed = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    missing: Any = None
    sums = Sharded(missing, [reached, missed], missing)
    optimizer = torch.optim.AdamW([reached, missed], lr=0.1, weight_decay=0.5)
    with sums.collect():
        (2 * reached).sum().backward()
        sums.reduce()
        assert missed.grad is not None
        assert missed.grad.tolist() == [0, 0, 0]
        optimizer.step()
    assert missed.tolist() == [torch.tensor(0.95).item()] * 3
    assert reached.grad is None

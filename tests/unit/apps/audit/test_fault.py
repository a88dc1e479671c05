"""The planted fault: exactly what the target rejected is accepted."""

from __future__ import annotations

import torch

from tlt.apps.audit.fault import PlantedFault
from tlt.base.types import DraftTree, SamplingParams
from tlt.speculation.law.params import BatchParams


def test_the_planted_fault_accepts_what_the_target_rejected_and_nothing_else() -> None:
    tree = DraftTree(torch.tensor([[0, 1, 2, 4]]), torch.tensor([[-1, 0, 1, 2]]), is_chain=True)
    logits_BNV = torch.zeros(1, 4, 6)
    for node, token in enumerate((1, 3, 4, 5)):  # the target says 1 as drafted, then 3 for the drafted 2
        logits_BNV[0, node, token] = 100.0
    noise, params = torch.zeros(1, 4, 6), BatchParams([SamplingParams()])
    (verdict,) = PlantedFault(0.0)(tree, logits_BNV, noise, params)
    assert verdict.tokens == (1, 3)
    faulty = PlantedFault(1.0)
    (verdict,) = faulty(tree, logits_BNV, noise, params)
    assert verdict.tokens == (1, 2, 4, 5)
    assert verdict.path == (0, 1, 2, 3)
    assert faulty.num_planted == 1

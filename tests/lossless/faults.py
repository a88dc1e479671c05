"""A fault planted in an engine, for the audit and the law's tests to find."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from torch import Tensor

from tlt.base.types import DraftTree, Verdict
from tlt.speculation.law.params import Law
from tlt.speculation.law.verify import verify

Verify = Callable[[DraftTree, Tensor, Law], list[Verdict]]
"""The type of `verify`, and of a faulty one in its place."""


class PlantedFault:
    """Accepts a rejected draft with `probability`, and walks on from it."""

    def __init__(self, probability: float, seed: int = 0) -> None:
        self.probability, self.random = probability, random.Random(seed)
        self.num_planted = 0

    def __call__(self, tree: DraftTree, logits_BNV: Tensor, law: Law) -> list[Verdict]:
        tokens, parents = tree.tokens_BN.tolist(), tree.parents_BN.tolist()
        verdicts = verify(tree, logits_BNV, law)
        logits_BNV = logits_BNV.clone()
        decided: set[tuple[int, int]] = set()
        while True:
            before = self.num_planted
            for row, verdict in enumerate(verdicts):
                node = verdict.path[-1]
                children = [child for child in range(1, tree.num_nodes) if parents[row][child] == node]
                if not children or (row, node) in decided:
                    continue
                decided.add((row, node))
                if self.random.random() < self.probability:
                    logits_BNV[row, node] = -math.inf
                    logits_BNV[row, node, tokens[row][children[0]]] = 0.0
                    self.num_planted += 1
            if self.num_planted == before:
                return verdicts
            verdicts = verify(tree, logits_BNV, law)

"""A drafter that a run of one rank trains and measures, for the tests of both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.lossless.helpers import CONFIG, VOCAB
from tests.unit.drafter.parts import TARGET
from tlt.base.records import DrafterCheck, DrafterReport
from tlt.base.types import Rollout
from tlt.drafter.drafting.hybrid import HybridDrafter
from tlt.drafter.drafting.learned.drafter import LearnedDrafter
from tlt.drafter.drafting.retrieval.ngram import NgramDrafter
from tlt.drafter.forms import new_model, pack_drafter
from tlt.drafter.measure import DrafterCopies, Measurement, Tally
from tlt.drafter.shape import drafter_shape
from tlt.drafter.training.buffer import TrajectoryBuffer
from tlt.drafter.training.losses import PRESETS
from tlt.drafter.training.spot import SpotTrainer
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.drafter.vocabulary import DraftVocabulary
from tlt.training.idle.drafter_training import LearnedDrafterTraining, Ranks, RankState
from tlt.training.report.timeline import Timeline


def make_rollouts(num: int = 6, length: int = 24, seed: int = 0) -> list[Rollout]:
    rng = random.Random(seed)
    rows = [[rng.randrange(VOCAB) for _ in range(4 + length)] for _ in range(num)]
    return [
        Rollout(f"p{i // 2}", i % 2, tuple(r[:4]), tuple(r[4:]), (0.0,) * length, "stop", 0)
        for i, r in enumerate(rows)
    ]


class Parts:
    def __init__(
        self,
        check_every: int = 1,
        max_passes: float = 1e9,
        vocabulary: DraftVocabulary | None = None,
        preset: str = "hass",
    ) -> None:
        self.model = new_model(drafter_shape(CONFIG, PRESETS[preset].method)).initialize(2)
        packed = pack_drafter(self.model.config, self.model.state_dict(), torch.float64)
        self.learned = LearnedDrafter(packed, TARGET, 4, vocabulary=vocabulary)
        self.hybrid = HybridDrafter(self.learned, NgramDrafter(4))
        self.trainer = DrafterTrainer(self.model, TARGET, PRESETS[preset], 1e-3)
        self.spot = SpotTrainer(self.trainer, TrajectoryBuffer(10**7), 64, max_passes=max_passes)
        copies = DrafterCopies(self.model, packed, TARGET, lambda group, counts: 0)
        ranks = Ranks(0, lambda value: [value], lambda tensors, weight: weight)
        self.training = LearnedDrafterTraining(
            copies, self.learned, self.spot, ranks, Timeline(0), check_every
        )

    def join(self, state: RankState, tally: Tally | None = None) -> None:
        """Adds a second rank, with this state at every step's end and this tally (None: the first one's)."""

        def gather(value: Any) -> list[Any]:
            return [value, state if isinstance(value, RankState) else tally or value]

        self.training.ranks = replace(self.training.ranks, gather=gather)

    def measure(self, rollouts: Sequence[Rollout], temperature: float, is_due: bool = True) -> Tally:
        return Measurement(self.training.copies, rollouts, temperature, random.Random("0/0"), is_due).tally()

    def train(self, micro_steps: int = 6) -> DrafterReport:
        left = iter([False] * micro_steps + [True])
        return self.training.train(lambda: next(left))

    def step(self, seed: int = 0, micro_steps: int = 6) -> DrafterCheck:
        """Trains on new responses, and checks. micro_steps: 0 for a step without training."""
        rollouts = make_rollouts(seed=seed)
        for rollout in rollouts:
            self.spot.buffer.add(rollout)
        return self.training.publish_and_measure(rollouts, self.train(micro_steps).num_tokens, 1.0)

"""The drafter during a rollout phase: it is trained on idle replicas, and measured at the end.

phase    begin ─▶ observe a response ─▶ … ─▶ train while idle ─▶ … ─▶ check ─▶ end        broken off: abandon
                     │                          │                       │
here         buffer to train on     micro-steps                       average, publish, measure
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.accounts import DrafterCheck, DrafterReport
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.model import DraftModel
from tlt.drafter.training.spot import SpotTrainer
from tlt.drafter.watch import DrafterWatch, Served
from tlt.report.timeline import Timeline
from tlt.rollout.protocol import DrafterSide
from tlt.spans import SpanName
from tlt.types import Finished, Rollout


class WatchedDrafter(DrafterSide):
    """A learned drafter that is measured and, with `spot`, trained.

    model: the copy that is trained and measured.
    learned: the engine's copy.
    watch: publishes and measures the drafter.
    spot: trains it in idle time; None: it is not trained.
    share: share of a phase's seconds for which it is also trained at the phase's end.
    """

    def __init__(
        self,
        model: DraftModel,
        learned: Served,
        watch: DrafterWatch,
        spot: SpotTrainer | None,
        timeline: Timeline,
        share: float = 0.0,
    ) -> None:
        self.model, self.learned, self.watch, self.spot = model, learned, watch, spot
        self.timeline, self.share = timeline, share
        self.choice = learned.choice
        if self.choice is not None:
            self.choice.is_led = True
            self._train_what_is_proposed()
        self._acceptance: float | None = None  # as measured last

    @property
    def version(self) -> int:
        return self.learned.version

    # ── during a phase ──────────────────────────────────────────────────────────────────────────────────────

    def foresee(self, prompts: Iterable[Sequence[int]]) -> None:
        if self.choice is not None:
            self.choice.begin(prompts)
            self._train_what_is_proposed()

    def begin(self) -> None:
        self._begun = time.perf_counter()

    @property
    def captures(self) -> bool:
        return self.spot is not None and self.spot.keeps_captured

    def observe(self, finished: Finished) -> None:
        if self.spot is not None:
            self.spot.add(finished.rollout, finished.captured_TF)

    def train(self, should_stop: Callable[[], bool]) -> DrafterReport:
        if self.spot is None:
            return DrafterReport()
        spot = self.spot
        return self.watch.run(lambda: spot.run(should_stop))

    def check(self, rollouts: Sequence[Rollout], num_tokens: int, temperature: float) -> DrafterCheck | None:
        if self.share:
            end = time.perf_counter() + self.share * (time.perf_counter() - self._begun)
            num_tokens += self.train(lambda: time.perf_counter() >= end).num_tokens
        with self.timeline.span(SpanName.CHECK_DRAFTER):
            check = self.watch.end_step(rollouts, num_tokens, temperature)
        if math.isfinite(check.acceptance):
            self._acceptance = check.acceptance
        if self.choice is None:
            return check
        vocabulary = self.choice.vocabulary
        check = replace(check, vocabulary=vocabulary.size, coverage=vocabulary.coverage(rollouts))
        self.choice.end(rollouts)
        return check

    def _train_what_is_proposed(self) -> None:
        if self.spot is not None:
            self.spot.trainer.token_ids = self.learned.model.token_ids

    def end(self, rollouts: Sequence[Rollout], seconds: float) -> None:
        if self.spot is not None:
            self.spot.end_step(rollouts, seconds)

    def abandon(self) -> None:
        self.watch.abandon()
        if self.spot is not None:
            self.spot.abandon()

    # ── between phases ──────────────────────────────────────────────────────────────────────────────────────

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.spot is None else self.spot.trainer.tensors()

    def counters(self) -> dict[str, Any]:
        chosen = {} if self.choice is None else {"vocabulary": self.choice.vocabulary.counters()}
        return {
            "version": self.version,
            "watch": self.watch.counters(),
            "acceptance": self._acceptance,
            **chosen,
        }

    def own_counters(self) -> dict[str, Any]:
        return {} if self.spot is None else self.spot.counters()

    def restore(self, counters: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        if self.spot is not None:
            self.learned.load(self.model.state_dict(), counters["version"])
            self.spot.restore(own)
        self.watch.restore(counters["watch"])
        self._acceptance = counters.get("acceptance")  # an older checkpoint has none, nor has it a vocabulary
        if self.choice is not None and (chosen := counters.get("vocabulary")):
            self.choice.restore(chosen)
            self._train_what_is_proposed()

    def save(self, folder: Path, about: Mapping[str, Any]) -> None:
        preset = {} if self.spot is None else {"preset": self.spot.trainer.preset.name}
        measured = {} if self._acceptance is None else {"acceptance": self._acceptance}
        about = {**about, "drafter_version": self.version, **preset, **measured}
        counts_V = None if self.choice is None else self.choice.vocabulary.counts_V
        save_drafter(folder, self.model, torch.float32, about, counts_V)

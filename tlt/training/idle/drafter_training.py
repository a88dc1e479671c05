"""The learned drafter during a rollout phase: trained on idle replicas, then published and measured.

begin ─▶ observe responses ─▶ train while idle ─▶ publish and measure ─▶ end     interrupted: abandon

        this step's training ── finite on every rank? ── no ─▶ undone: back to the last finite version
                                        │ yes
                        published: the ranks' average ─▶ does the engine's copy compute what the trainer's
                                                         does? ── no ─▶ RuntimeError
                                                          └─▶ acceptance, every `check_every` steps
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.base.records import DrafterCheck, DrafterReport
from tlt.base.spans import SpanName
from tlt.base.types import Finished, Rollout
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.measure import TOLERANCE, DrafterCopies, Measurement, Tally, check_arrival, to_check
from tlt.drafter.training.publisher import EngineDrafter, Publisher
from tlt.drafter.training.spot import SpotTrainer
from tlt.training.idle.protocol import DrafterTraining
from tlt.training.report.timeline import Timeline


@dataclass(frozen=True)
class Ranks:
    rank: int
    gather: Callable[[Any], list[Any]]
    average: Callable[[Sequence[Tensor], float], float]


@dataclass(frozen=True)
class RankState:
    """failure: empty: none.
    is_limited: stopped at MAX_PASSES with idle time left.
    """

    failure: str
    version: int
    is_limited: bool
    num_tokens: int = 0


CHECK_EVERY = 4
"""A measurement takes 50 ms of a second's step of the headline: one in four steps leaves a percent."""


class LearnedDrafterTraining(DrafterTraining):
    """spot: trains `copies.model` in idle time; None: the drafter is only measured.
    check_every: steps between two measurements of acceptance; the first step measures.
    share: extra training at the phase's end, as a share of the phase's seconds.
    """

    def __init__(
        self,
        copies: DrafterCopies,
        served: EngineDrafter,
        spot: SpotTrainer | None,
        ranks: Ranks,
        timeline: Timeline,
        check_every: int = CHECK_EVERY,
        share: float = 0.0,
    ) -> None:
        self.copies, self.served, self.spot, self.ranks = copies, served, spot, ranks
        self.timeline, self.check_every, self.share = timeline, check_every, share
        self.publisher = Publisher(spot.trainer, served, ranks.average) if spot is not None else None
        self.choice = served.vocabulary_choice
        if self.choice is not None:
            self.choice.is_led = True
            self._train_what_is_proposed()
        self._failure = ""  # this rank, this step
        self._is_limited = False  # stopped at MAX_PASSES
        self._num_checks = 0
        self._acceptance: float | None = None

    @property
    def version(self) -> int:
        return self.served.version

    # ── during a phase ──────────────────────────────────────────────────────────────────────────────────────

    def foresee(self, prompts: Iterable[Sequence[int]]) -> None:
        if self.choice is not None:
            self.choice.begin(prompts)
            self._train_what_is_proposed()

    def begin(self) -> None:
        self._begun = time.perf_counter()

    @property
    def captures(self) -> bool:
        return self.spot is not None

    def observe(self, finished: Finished) -> None:
        if self.spot is not None:
            self.spot.add(finished.rollout, finished.captured_TF)

    def train(self, should_stop: Callable[[], bool]) -> DrafterReport:
        if self.spot is None or self._failure:
            return DrafterReport()
        try:
            report = self.spot.run(should_stop)
        except FloatingPointError as error:
            self._failure = str(error)
            return DrafterReport()
        self._is_limited |= report.is_limited
        return report

    def publish_and_measure(
        self, rollouts: Sequence[Rollout], num_tokens: int, temperature: float
    ) -> DrafterCheck:
        """Raises RuntimeError if an engine did not receive the drafter, or ranks differ."""
        if self.share:
            end = time.perf_counter() + self.share * (time.perf_counter() - self._begun)
            num_tokens += self.train(lambda: time.perf_counter() >= end).num_tokens
        with self.timeline.span(SpanName.CHECK_DRAFTER):
            check = self._publish_measured(rollouts, num_tokens, temperature)
        if math.isfinite(check.acceptance):
            self._acceptance = check.acceptance
        if self.choice is None:
            return check
        vocabulary = self.choice.vocabulary
        check = replace(check, vocabulary=vocabulary.size, coverage=vocabulary.coverage(rollouts))
        self.choice.end(rollouts)
        return check

    def end(self, rollouts: Sequence[Rollout], seconds: float) -> None:
        if self.spot is not None:
            self.spot.end_step(rollouts, seconds)

    def abandon(self) -> None:
        self._failure, self._is_limited = "", False
        if self.spot is not None and self.publisher is not None:
            self.publisher.undo(self.version)
            self.spot.abandon()

    def _train_what_is_proposed(self) -> None:
        if self.spot is not None:
            self.spot.trainer.token_ids = self.served.model.token_ids

    # ── at a phase's end ────────────────────────────────────────────────────────────────────────────────────

    def _publish_measured(
        self, rollouts: Sequence[Rollout], num_tokens: int, temperature: float
    ) -> DrafterCheck:
        is_due = self._num_checks % self.check_every == 0
        rng = random.Random(f"{self._num_checks}/{self.ranks.rank}")  # differs by rank and by step
        self._num_checks += 1
        own = RankState(self._failure, self.version, self._is_limited, num_tokens)
        self._failure, self._is_limited = "", False
        states: list[RankState] = self.ranks.gather(own)
        if not is_due and not any(state.num_tokens or state.failure for state in states):
            training = "off" if self.publisher is None else "no idle time"
            return DrafterCheck(self.version, training=training)
        begun, before = time.perf_counter(), math.nan
        measurement = Measurement(self.copies, rollouts, temperature, rng, is_due)
        if self.publisher is not None:
            before = measurement.accepted()
        if is_due:
            begun = time.perf_counter()  # the target reads the sample in any case
        is_published, training = self._publish_or_undo(states, num_tokens)
        tally = measurement.tally()
        if is_published:
            tally = replace(tally, accepted_before=before, publish_seconds=time.perf_counter() - begun)
        tallies: list[Tally] = self.ranks.gather(tally)
        check_arrival(tallies, self.version, TOLERANCE[self.copies.packed.dtype])
        return to_check(tallies, self.version, training)

    def _publish_or_undo(self, states: Sequence[RankState], num_tokens: int) -> tuple[bool, str]:
        """Returns (whether a version was published, `DrafterCheck.training`)."""
        if self.publisher is None:
            return False, "off"
        version = max(state.version for state in states)
        try:
            if failure := next(filter(None, (state.failure for state in states)), ""):
                raise FloatingPointError(failure)
            if not self.publisher.publish(num_tokens, version + 1):
                return False, "no idle time"
        except FloatingPointError as error:
            self.publisher.undo(version)
            return False, f"undone: {error}"
        is_limited = any(state.is_limited for state in states)
        return True, "trained; limit of passes reached" if is_limited else "trained"

    # ── between phases ──────────────────────────────────────────────────────────────────────────────────────

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.spot is None else self.spot.trainer.tensors()

    def counters(self) -> dict[str, Any]:
        chosen = {} if self.choice is None else {"vocabulary": self.choice.vocabulary.counters()}
        return {
            "version": self.version,
            "watch": {"checks": self._num_checks},
            "acceptance": self._acceptance,
            **chosen,
        }

    def own_counters(self) -> dict[str, Any]:
        return {} if self.spot is None else self.spot.counters()

    def restore(self, counters: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        if self.spot is not None and self.publisher is not None:
            self.served.load(self.copies.model.state_dict(), counters["version"])
            self.spot.restore(own)
            self.publisher.keep()
        self._num_checks = counters["watch"]["checks"]
        self._acceptance = counters["acceptance"]
        if self.choice is not None:
            self.choice.restore(counters["vocabulary"])
            self._train_what_is_proposed()

    def save(self, folder: Path, about: Mapping[str, Any]) -> None:
        preset = {} if self.spot is None else {"preset": self.spot.trainer.preset.name}
        measured = {} if self._acceptance is None else {"acceptance": self._acceptance}
        about = {**about, "drafter_version": self.version, **preset, **measured}
        counts_V = None if self.choice is None else self.choice.vocabulary.counts_V
        save_drafter(folder, self.copies.model, torch.float32, about, counts_V)

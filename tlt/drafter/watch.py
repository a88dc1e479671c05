"""The learned drafter in service: every step ends with a publication and a check.

    this step's update ── finite on every rank? ── no ─▶ undone: back to the last finite version
                                │ yes
                            published ─▶ the engine's copy on responses ── not the trainer's? ─▶ error
                                             └▶ acceptance, for the metrics and for the choice of idle work

measure.py says how good a drafter is; that a bad one drafts little is the tuner's doing. All ranks decide
alike, because they decide by numbers gathered from all. Where steps are so short that measuring is dear,
acceptance is measured every so many steps, and all else checked in each.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tlt.accounts import DrafterCheck, DrafterReport
from tlt.drafter.drafting.choice import VocabularyChoice
from tlt.drafter.measure import Measured, Measurement, Subject, Tally
from tlt.drafter.model import PackedDrafter
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.types import Rollout

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative distance allowed between the logits of the engine's copy, by its dtype, and of the trainer's
float32 copy."""


class Served(Protocol):
    """The learned drafter as the engine has it.

    choice: chooses the tokens that it proposes; None: they are fixed.
    """

    @property
    def choice(self) -> VocabularyChoice | None: ...

    @property
    def model(self) -> PackedDrafter: ...

    @property
    def version(self) -> int: ...

    def load(self, tensors: dict[str, Tensor], version: int) -> None: ...


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run. All of them make the same calls, in the same order.

    rank: this one's number.
    gather: returns every rank's value, on every rank.
    average: replaces tensors by their mean over the ranks, by weight, and returns the total weight; 0
        changes nothing.
    """

    rank: int
    gather: Callable[[Any], list[Any]]
    average: Callable[[Sequence[Tensor], float], float]


@dataclass(frozen=True)
class RankState:
    """The state of one rank at the end of a step.

    failure: why its training failed; empty: it did not.  version: that its engine drafts with.
    is_limited: it could have trained more, but for drafter.max_passes.  num_tokens: that it trained on.
    """

    failure: str
    version: int
    is_limited: bool
    num_tokens: int = 0

    @property
    def has_trained(self) -> bool:
        return self.num_tokens > 0 or bool(self.failure)


@dataclass(frozen=True)
class Update:
    """The outcome of a step's training: whether a new version was published, or why it was undone (empty:
    it was not)."""

    is_published: bool = False
    failure: str = ""


class Publisher:
    """Takes the drafter from its trainer to the engine, and back to the last version known to be finite."""

    def __init__(
        self, trainer: DrafterTrainer, served: Served, average: Callable[[Sequence[Tensor], float], float]
    ) -> None:
        self.trainer, self.served, self.average = trainer, served, average
        self.keep()

    def keep(self) -> None:
        """Remembers the drafter and its optimizer as they are: the last version known to be finite."""
        self._kept = [tensor.clone() for tensor in self.trainer.shared_tensors()]
        self._kept_tokens = self.trainer.num_tokens
        self._kept_version = self.served.version

    def publish(self, num_tokens: int, version: int) -> Update:
        """Averages the ranks' drafters, weighted by the tokens each trained on, and hands the mean to the
        engine as `version`. Nothing is published where nobody trained, or where the mean is not finite."""
        shared = self.trainer.shared_tensors()
        if self.average(shared, num_tokens) == 0:
            return Update()
        if not all(bool(tensor.isfinite().all()) for tensor in shared):
            return Update(failure="its weights are not finite after training")
        self.served.load(self.trainer.model.state_dict(), version)
        self.keep()
        return Update(is_published=True)

    def undo(self, version: int) -> None:
        """Takes trainer and optimizer back to what `keep` remembers. `version`: the latest that any engine
        drafts with; the engine is taken back too if that is a later one."""
        for tensor, kept in zip(self.trainer.shared_tensors(), self._kept, strict=True):
            tensor.copy_(kept)
        self.trainer.optimizer.zero_grad(set_to_none=True)
        self.trainer.num_tokens = self._kept_tokens
        if version != self._kept_version:
            self.served.load(self.trainer.model.state_dict(), version + 1)
            self._kept_version = version + 1


class DrafterWatch:
    """Publishes and measures the drafter at the end of every step.

    subject: the drafter's two copies and what they are measured with.
    trainer: trains `subject.model`; None: the drafter stays as it is.
    served: the engine's side of `subject.packed`.
    check_every: steps between two measurements of acceptance; the first step measures.
    """

    def __init__(
        self,
        subject: Subject,
        trainer: DrafterTrainer | None,
        served: Served,
        ranks: Ranks,
        check_every: int = 1,
    ) -> None:
        self.subject, self.served, self.ranks = subject, served, ranks
        self.publisher = Publisher(trainer, served, ranks.average) if trainer is not None else None
        self.check_every = check_every
        self._failure = ""  # of this rank's training in this step
        self._is_limited = False  # this rank could have trained more in this step, but for drafter.max_passes
        self._num_checks = 0

    # ── while the step goes on ──────────────────────────────────────────────────────────────────────────────

    def run(self, session: Callable[[], DrafterReport]) -> DrafterReport:
        """Runs a session of training. One that meets a number that is not finite ends the training of this
        step."""
        if self._failure:
            return DrafterReport()
        try:
            report = session()
        except FloatingPointError as error:
            self._failure = str(error)
            return DrafterReport()
        self._is_limited |= report.is_limited
        return report

    def abandon(self) -> None:
        """Breaks the step off: drops what was trained in it, as its responses are dropped."""
        self._failure, self._is_limited = "", False
        if self.publisher is not None:
            self.publisher.undo(self.served.version)

    # ── at its end ──────────────────────────────────────────────────────────────────────────────────────────

    def end_step(self, rollouts: Sequence[Rollout], num_tokens: int, temperature: float) -> DrafterCheck:
        """Publishes or undoes the step's training, and measures the drafter. Where no rank has trained, the
        drafter is the one that was measured before, and that is all unless its acceptance is due.

        Every rank calls this with the same responses, all that the step brought, and the tokens it trained
        on itself. RuntimeError where the drafter did not arrive in an engine, or not the same on all
        ranks.
        """
        is_due = self._num_checks % self.check_every == 0
        states = self._exchange_states(num_tokens)
        if not is_due and not any(state.has_trained for state in states):
            self._num_checks += 1
            return DrafterCheck(self.served.version, math.nan, math.nan, self._outcome(Update(), False))
        begun = time.perf_counter()
        rng = random.Random(f"{self._num_checks}/{self.ranks.rank}")  # others on every rank and in every step
        measurement = Measurement(self.subject, rollouts, temperature, rng, is_due)
        if self.publisher is not None:
            measurement.note_before()
        if is_due:
            begun = time.perf_counter()  # what came before would have been done without training, too
        update = self._publish_or_undo(states, num_tokens)
        measured = self._measure(measurement, begun if update.is_published else math.inf)
        training = self._outcome(update, any(state.is_limited for state in states))
        self._num_checks += 1
        return DrafterCheck(
            self.served.version,
            measured.acceptance,
            measured.retrieval,
            training,
            measured.before if update.is_published else math.nan,
            measured.publish_seconds,
        )

    def _exchange_states(self, num_tokens: int) -> list[RankState]:
        """Returns how the step went on every rank; this rank's own record starts anew."""
        own = RankState(self._failure, self.served.version, self._is_limited, num_tokens)
        states: list[RankState] = self.ranks.gather(own)
        self._failure, self._is_limited = "", False
        return states

    def _publish_or_undo(self, states: Sequence[RankState], num_tokens: int) -> Update:
        """Publishes what was trained, or undoes it: a failure on any rank undoes the update of all."""
        if self.publisher is None:
            return Update()
        version = max(state.version for state in states)
        update = Update(failure=next(filter(None, (state.failure for state in states)), ""))
        if not update.failure:
            update = self.publisher.publish(num_tokens, version + 1)
        if update.failure:
            self.publisher.undo(version)
        return update

    def _measure(self, measurement: Measurement, begun: float) -> Measured:
        """Measures the drafter as it is now. begun: when its publication did; inf: there is none."""
        tally = measurement.tally()
        publish_seconds = max(time.perf_counter() - begun, 0.0)
        tallies: list[Tally] = self.ranks.gather(replace(tally, publish_seconds=publish_seconds))
        check_arrival(tallies, self.served.version, TOLERANCE[self.subject.packed.dtype])
        return Measured.of(tallies)

    def _outcome(self, update: Update, is_limited: bool) -> str:
        """Returns what the step's training came to, as the metrics say it (`DrafterCheck.training`)."""
        if self.publisher is None:
            return "off"
        if update.failure:
            return f"undone: {update.failure}"
        if not update.is_published:
            return "no idle time"
        return "trained; max_passes reached" if is_limited else "trained"

    # ── across restarts ─────────────────────────────────────────────────────────────────────────────────────

    def counters(self) -> dict[str, Any]:
        """Returns the number of steps so far, as JSON; which of them measure follows from it."""
        return {"checks": self._num_checks}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Takes up what `counters` returned; model and trainer must have been restored before."""
        self._num_checks = counters["checks"]
        if self.publisher is not None:
            self.publisher.keep()


def check_arrival(tallies: Sequence[Tally], version: int, tolerance: float) -> None:
    """Raises RuntimeError where ranks hold different weights, or an engine's copy computes other logits than
    the trainer's."""
    for rank, tally in enumerate(tallies):
        if tally.checksum != tallies[0].checksum:
            raise RuntimeError(
                f"drafter version {version}: rank {rank} holds other weights than rank 0 "
                f"(their sums are {tally.checksum!r} and {tallies[0].checksum!r}); the average did not arrive"
            )
        if tally.proposed != tallies[0].proposed:
            raise RuntimeError(
                f"drafter version {version}: rank {rank} proposes other tokens than rank 0; their choices "
                "differ"
            )
        if not tally.distance <= tolerance:
            raise RuntimeError(
                f"drafter version {version} did not arrive in rank {rank}'s engine: its outputs are "
                f"{tally.distance:.1e} away "
                f"from the trainer's, where {tolerance:.0e} is allowed"
            )

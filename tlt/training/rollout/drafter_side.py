"""The drafter's side of a rollout phase: it is trained where a replica falls idle, refreshed where one still generates, and
measured at the end.

    phase    begin ─▶ observe a response ─▶ … ─▶ train while idle ─▶ … ─▶ check ─▶ end        broken off: abandon
                         │                          │                       │
    here         buffer to train on     micro-steps, mailbox to others    average, publish, measure

`DrafterSide` itself does nothing: it is the null form, so that a phase need not ask whether there is a drafter. Knows no queue
and no problems.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from tlt.accounts import DrafterCheck, DrafterReport
from tlt.build.drafter import build_draft_model, build_spot_trainer
from tlt.config.drafter import DrafterSection
from tlt.distributed.mailbox import Mailbox, connect_mailbox
from tlt.distributed.world import World, average_weighted, gather_objects
from tlt.drafter.drafting.ahead import AheadDrafter
from tlt.drafter.drafting.hybrid import HybridDrafter
from tlt.drafter.drafting.learned import LearnedDrafter
from tlt.drafter.drafting.suffix_index import count_retrieved
from tlt.drafter.formats.folder import StoredDrafter, save_drafter
from tlt.drafter.measure import Subject
from tlt.drafter.model import DraftModel
from tlt.drafter.service import DrafterWatch, Ranks, Served
from tlt.drafter.training.spot import SpotTrainer
from tlt.engine.backend import RolloutBackend
from tlt.report.timeline import Timeline
from tlt.spans import SpanName
from tlt.types import Finished, Rollout
from tlt.vllm.drafter import VllmDrafter


class DrafterSide:
    """Says what a phase asks of whoever looks after the drafter, and does nothing: for evaluations, and for a run without a
    learned drafter."""

    @property
    def num_refreshes(self) -> int:
        """Drafters of other replicas that this one took up in the phase."""
        return 0

    @property
    def version(self) -> int:
        """Counts the drafter's publications."""
        return 0

    def foresee(self, prompts: Iterable[Sequence[int]]) -> None:
        """Prepares for the prompts that are answered next, the same on every rank."""

    def begin(self, rollout: str) -> None:
        """Prepares for a phase, given a name that no other phase of the run has."""

    @property
    def captures(self) -> bool:
        """Whether the engine is to return what it captured of the responses that end."""
        return False

    def observe(self, finished: Finished) -> None:
        """Takes note of a response that has ended here."""

    def refresh(self) -> None:
        """Lets the engine draft with the latest drafter of another replica. It is called between two engine steps."""

    def train(self, should_stop: Callable[[], bool]) -> DrafterReport:
        """Trains until `should_stop`, or until there is nothing to train on."""
        return DrafterReport()

    def check(self, rollouts: Sequence[Rollout], num_tokens: int, temperature: float) -> DrafterCheck | None:
        """Averages, publishes and measures the drafter, together with all ranks. None: there is none to measure.

        rollouts: all that the phase brought, the same on every rank.  num_tokens: what this rank trained on.
        """
        return None

    def end(self, rollouts: Sequence[Rollout], seconds: float) -> None:
        """Ends the phase, which took so many seconds, and keeps what the next one trains on."""

    def abandon(self) -> None:
        """Goes back to before the phase, which was broken off."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that train, by name: themselves."""
        return {}

    def counters(self) -> dict[str, Any]:
        """Returns what else a resumed run needs, the same on all ranks, as JSON."""
        return {}

    def own_counters(self) -> dict[str, Any]:
        """Returns what else a resumed rank needs, its own, as JSON."""
        return {}

    def restore(self, counters: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Takes up what `counters` and `own_counters` returned; the tensors must have been filled."""

    def save(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Writes the drafter for others to load, with facts about it."""


class WatchedDrafter(DrafterSide):
    """Looks after a learned drafter.

    model: the copy that is trained and measured.  learned: the engine's.  watch: who publishes and measures it.
    spot: who trains it; None: it stays as it is.  refresh: lets others use it before the rollout ends; None: nobody does.
    share: of a phase's seconds, for which it is trained at the end of the phase, busy or not.
    """

    def __init__(
        self,
        model: DraftModel,
        learned: Served,
        watch: DrafterWatch,
        spot: SpotTrainer | None,
        refresh: DrafterRefresh | None,
        timeline: Timeline,
        share: float = 0.0,
    ) -> None:
        self.model, self.learned, self.watch, self.spot = model, learned, watch, spot
        self.mail, self.timeline, self.share = refresh, timeline, share
        self.choice = learned.choice if isinstance(learned, LearnedDrafter) else None
        if self.choice is not None:
            self.choice.is_led = True
            self._train_what_is_proposed()
        self._trains = False  # in this phase
        self._acceptance: float | None = None  # as measured last

    @property
    def num_refreshes(self) -> int:
        return 0 if self.mail is None else self.mail.num_refreshes

    @property
    def version(self) -> int:
        return self.learned.version

    # ── during a phase ───────────────────────────────────────────────────────────────────────────────────────────────

    def foresee(self, prompts: Iterable[Sequence[int]]) -> None:
        if self.choice is not None:
            self.choice.begin(prompts)
            self._train_what_is_proposed()

    def begin(self, rollout: str) -> None:
        self._trains = self.spot is not None and self.watch.trains
        self._begun = time.perf_counter()
        if self.mail is not None:
            self.mail.begin(rollout)

    @property
    def captures(self) -> bool:
        return self._trains and self.spot is not None and self.spot.keeps_captured

    def observe(self, finished: Finished) -> None:
        if self._trains and self.spot is not None:
            self.spot.add(finished.rollout, finished.captured_TF)

    def refresh(self) -> None:
        if self.mail is not None:
            self.mail.refresh()

    def train(self, should_stop: Callable[[], bool]) -> DrafterReport:
        if self.spot is None or not self._trains:
            return DrafterReport()
        spot, publish = self.spot, None if self.mail is None else self.mail.publish
        return self.watch.run(lambda: spot.run(should_stop, publish))

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

    # ── between phases ───────────────────────────────────────────────────────────────────────────────────────────────

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.spot is None else self.spot.trainer.tensors()

    def counters(self) -> dict[str, Any]:
        chosen = {} if self.choice is None else {"vocabulary": self.choice.vocabulary.counters()}
        return {"version": self.version, "watch": self.watch.counters(), "acceptance": self._acceptance, **chosen}

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


def watch_drafter(
    settings: DrafterSection,
    stored: StoredDrafter | None,
    engine: RolloutBackend,
    world: World,
    timeline: Timeline,
    *,
    run: str,
    seed: int,
    share: float = 0.0,
) -> DrafterSide:
    """Makes the copy of the engine's learned drafter that is trained, who trains it, and who watches over it.

    run: a name that no other run of these ranks has.  seed: of the windows to train on; other ranks draw others by it.
    share: see WatchedDrafter.
    """
    drafter, target = engine.drafter, engine.target
    if isinstance(drafter, AheadDrafter):
        drafter = drafter.inner
    if stored is None or not isinstance(drafter, HybridDrafter | VllmDrafter):
        return DrafterSide()
    assert target is not None, "whoever has a learned drafter keeps the policy for it"
    model = build_draft_model(stored, world.device)
    learned = drafter.learned if isinstance(drafter, HybridDrafter) else drafter
    spot = None
    if settings.train:
        seed = seed * world.world_size + world.rank
        spot = build_spot_trainer(settings, stored, model, target, seed, timeline.add)
    watch = DrafterWatch(
        Subject(model, learned.model, target, count_retrieved),
        spot.trainer if spot is not None else None,
        learned,
        drafter.set_aside,
        Ranks(world.rank, partial(gather_objects, world), partial(average_weighted, world)),
        settings.gate,
        settings.check_every,
    )
    refresh = None if spot is None else connect_refresh(settings, world, run, learned)
    return WatchedDrafter(model, learned, watch, spot, refresh, timeline, share)


class DrafterRefresh:
    """Takes drafters from replicas that train to engines that still generate, within one rollout: at most one in `seconds`, on
    either side. What a rollout publishes is of no use to the next one, which starts with the average.

    mailbox: the run's own.
    """

    def __init__(self, mailbox: Mailbox, learned: Served, seconds: float) -> None:
        self.mailbox, self.learned, self.seconds = mailbox, learned, seconds
        self.num_refreshes = 0

    def begin(self, rollout: str) -> None:
        """Starts a rollout, under a name of its own in this run. A version is no such name: after an undone update it comes
        again."""
        self._header = f"{rollout}\n".encode()
        self._next = time.perf_counter() + self.seconds
        self.num_refreshes = 0

    def publish(self, model: DraftModel) -> None:
        """Sends the drafter, unless it holds a number that is not finite: that the end of the step deals with."""
        if self._is_due():
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            if all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
                self.mailbox.send(self._header + save(tensors))

    def refresh(self) -> None:
        """Gives the engine the latest drafter that another replica has published in this rollout."""
        if self._is_due() and (message := self.mailbox.receive()) is not None and message.startswith(self._header):
            self.learned.load(load(message[len(self._header) :]), self.learned.version + 1)
            self.num_refreshes += 1

    def _is_due(self) -> bool:
        now = time.perf_counter()
        is_due = now >= self._next
        if is_due:
            self._next = now + self.seconds
        return is_due


def connect_refresh(settings: DrafterSection, world: World, run: str, learned: Served) -> DrafterRefresh | None:
    """Returns the refresh of the run of that name; None: nobody would publish, or nobody would take it up."""
    if world.world_size == 1 or not settings.refresh_during_rollout:
        return None
    mailbox = connect_mailbox(world.store, f"drafter of {run}")  # runs side by side share the store
    return DrafterRefresh(mailbox, learned, settings.refresh_seconds)

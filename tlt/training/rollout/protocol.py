"""What a rollout phase asks of those around it. The base classes do nothing, so a phase never asks whether there is one.

Scorers       score responses, in processes (rl/rewards.py)
Journal       keeps responses and rewards on disk (saved/journal.py)
DrafterSide   trains and measures the drafter (drafter_side.py)
Ahead         generates the next steps' responses in idle time (ahead.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tlt.accounts import AheadReport, DrafterCheck, DrafterReport
from tlt.distributed.ahead_queue import AheadQueue
from tlt.engine.backend import Unfinished
from tlt.types import Finished, Key, NoiseKey, Request, Reward, Rollout

if TYPE_CHECKING:
    from torch import Tensor


class Scorers(Protocol):
    """Scores responses while others are generated; `RewardPool` does so in processes."""

    def submit(self, key: Key, problem: Mapping[str, Any], text: str, token_ids: Sequence[int], step: int) -> None:
        """Takes a response in, without waiting. step: updates behind the policy that wrote it."""

    def collect(self) -> dict[Key, Reward]:
        """Returns the rewards that are there now and were not returned before."""
        ...

    def drain(self, patience: float) -> dict[Key, Reward]:
        """Returns the rewards of all that was submitted and not returned before."""
        ...

    def abandon(self) -> None:
        """Forgets all that was submitted."""


@dataclass(frozen=True)
class Recalled:
    """What is left to do of a phase, and what an earlier attempt has done of it.

    requests: by unit, as they were asked for; those that were running have the tokens that they had then.
    rollouts: the responses that are finished.  rewards: of those among them that are scored.
    """

    requests: Sequence[Sequence[Request]]
    rollouts: Sequence[Rollout] = ()
    rewards: Mapping[Key, Reward] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that are not generated again."""
        running = sum(len(request.token_ids) for unit in self.requests for request in unit)
        return running + sum(len(rollout.token_ids) for rollout in self.rollouts)


class Journal:
    """Says what a phase asks of a journal, and keeps none."""

    def begin(self, phase: str, requests: Sequence[Sequence[Request]]) -> Recalled:
        """Enters a phase, whose name no other phase of the run has, and returns what is left to do of these requests. Every
        rank calls it with the same arguments."""
        return Recalled(requests)

    def note_running(self, responses: Sequence[Unfinished], at_once: bool = False) -> None:
        """Takes note of the responses in the making, after every engine step. at_once: of each new token of them."""

    def note_finished(self, rollout: Rollout) -> None:
        """Takes note of a response that has ended here."""

    def note_rewards(self, rewards: Mapping[Key, Reward]) -> None:
        """Takes note of the rewards of responses that have ended here."""

    def close(self) -> None:
        """Ends the journal's file."""


@dataclass(frozen=True)
class Receivers:
    """Where responses go that have ended. decode: response tokens → text, which is scored.  journal: keeps them on disk."""

    scorers: Scorers
    decode: Callable[[Sequence[int]], str]
    journal: Journal = field(default_factory=Journal)


class DrafterSide:
    """Says what a phase asks of whoever looks after the drafter, and does nothing: for evaluations, and for a run without a
    learned drafter."""

    @property
    def version(self) -> int:
        """Counts the drafter's publications."""
        return 0

    def foresee(self, prompts: Iterable[Sequence[int]]) -> None:
        """Prepares for the prompts that are answered next, the same on every rank."""

    def begin(self) -> None:
        """Prepares for a phase."""

    @property
    def captures(self) -> bool:
        """Whether the engine is to return what it captured of the responses that end."""
        return False

    def observe(self, finished: Finished) -> None:
        """Takes note of a response that has ended here."""

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


Found = tuple[tuple[int, ...], bool]
"""Tokens of a response, and whether they are all of it."""


class Ahead:
    """Says what a phase asks of whoever generates ahead, and does nothing.

    num_offered: tokens that were generated ahead for the step that is running now.
    """

    num_offered = 0

    def begin(self, queue: AheadQueue) -> None:
        """Prepares for a round, in which the replicas share their requests through this queue."""

    def run(self, should_stop: Callable[[], bool]) -> AheadReport:
        """Generates until `should_stop`, or until there is nothing left to do; the engine is idle before and after. Seconds are
        the caller's to measure."""
        return AheadReport()

    def take_found(self) -> dict[NoiseKey, Found]:
        """Returns what was generated since this was last asked, for all replicas to keep."""
        return {}

    def keep(self, found: Iterable[Mapping[NoiseKey, Found]]) -> None:
        """Keeps what all replicas have generated."""

    def end(self) -> None:
        """Ends the phase: its references are of no more use."""


NO_AHEAD = Ahead()

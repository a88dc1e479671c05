"""What a rollout phase asks of those around it. The base classes do nothing, so a phase never asks whether
there is one.

Scorers           score responses, in processes (tasks/rewards/pool.py)
Journal           keeps responses and rewards on disk (training/saved/journal.py)
DrafterTraining   trains and measures the drafter (watched_drafter.py)
Ahead             generates the next steps' responses in idle time (ahead.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tlt.base.records import AheadReport, DrafterCheck, DrafterReport
from tlt.base.types import Finished, NoiseKey, Request, ResponseId, Reward, Rollout
from tlt.engine.backend import Unfinished
from tlt.training.rollout.ahead_queue import AheadQueue

if TYPE_CHECKING:
    from torch import Tensor


class Scorers(Protocol):
    """Scores responses while others are generated. `RewardPool` is the one that runs in processes.

    by_group: whether a response has its reward only once its group is complete.
    """

    by_group: bool

    def submit(
        self,
        response_id: ResponseId,
        problem: Mapping[str, Any],
        text: str,
        token_ids: Sequence[int],
        step: int,
    ) -> None:
        """Queues a response for scoring and returns at once.

        step: policy updates before the policy that wrote the response.
        """

    def complete(self, group: Sequence[ResponseId]) -> None:
        """Tells that all responses of a group were submitted; it sees them in this order."""

    def withdraw(self, response_ids: Iterable[ResponseId]) -> None:
        """Forgets submitted responses, which another rank scores."""

    def collect(self) -> dict[ResponseId, Reward]:
        """Returns the new rewards since the last call."""
        ...

    def drain(self, patience: float) -> dict[ResponseId, Reward]:
        """Waits for all rewards that are still missing, at most `patience` seconds, and returns them."""
        ...

    def abandon(self) -> None:
        """Drops all responses that are queued."""


@dataclass(frozen=True)
class Recalled:
    """What an earlier attempt at a phase has done, and what is left to do."""

    requests: Sequence[Sequence[Request]]
    """What is left, by unit. Unfinished responses carry the tokens that they had."""
    rollouts: Sequence[Rollout] = ()
    """The finished responses."""
    rewards: Mapping[ResponseId, Reward] = field(default_factory=dict)
    """The rewards of the finished responses that were scored."""

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be generated again."""
        running = sum(len(request.token_ids) for unit in self.requests for request in unit)
        return running + sum(len(rollout.token_ids) for rollout in self.rollouts)


class Journal:
    """Records responses and rewards, so that a restarted run does not generate them again. This base keeps
    nothing."""

    def begin(self, phase: str, requests: Sequence[Sequence[Request]]) -> Recalled:
        """Begins a phase, and returns what is left to do. Every rank calls it with the same arguments.

        phase: a name that no other phase of the run has.
        """
        return Recalled(requests)

    def note_running(self, responses: Sequence[Unfinished], at_once: bool = False) -> None:
        """Records the unfinished responses after an engine step. at_once: writes every new token now."""

    def note_finished(self, rollout: Rollout) -> None:
        """Records a finished response."""

    def note_rewards(self, rewards: Mapping[ResponseId, Reward]) -> None:
        """Records rewards."""

    def close(self) -> None:
        """Closes the journal's file."""


@dataclass(frozen=True)
class Receivers:
    """Where finished responses go."""

    scorers: Scorers
    decode: Callable[[Sequence[int]], str]
    """Response tokens → the text that is scored."""
    journal: Journal = field(default_factory=Journal)


class DrafterTraining:
    """Trains and measures the drafter during a phase. This base does nothing: it serves evaluations, and runs
    that have no learned drafter."""

    @property
    def version(self) -> int:
        """How often the drafter was published."""
        return 0

    def foresee(self, prompts: Iterable[Sequence[int]]) -> None:
        """Prepares for the prompts of the next phase. Every rank passes the same ones."""

    def begin(self) -> None:
        """Begins a phase."""

    @property
    def captures(self) -> bool:
        """Whether the engine should return the target's features with finished responses."""
        return False

    def observe(self, finished: Finished) -> None:
        """Takes a finished response as training data."""

    def train(self, should_stop: Callable[[], bool]) -> DrafterReport:
        """Trains until `should_stop` or until there is no data left."""
        return DrafterReport()

    def check(self, rollouts: Sequence[Rollout], num_tokens: int, temperature: float) -> DrafterCheck | None:
        """Averages the ranks' drafters, publishes the result and measures it. A collective; None without a
        drafter.

        rollouts: all responses of the phase, the same on every rank.
        num_tokens: tokens that this rank trained on.
        """
        return None

    def end(self, rollouts: Sequence[Rollout], seconds: float) -> None:
        """Ends a phase of this many seconds, and keeps the data that the next one trains on."""

    def abandon(self) -> None:
        """Undoes a phase that was interrupted."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the trained tensors by name, not copies."""
        return {}

    def counters(self) -> dict[str, Any]:
        """Returns the state besides tensors that all ranks share, as JSON."""
        return {}

    def own_counters(self) -> dict[str, Any]:
        """Returns this rank's own state besides tensors, as JSON."""
        return {}

    def restore(self, counters: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Restores the state of `counters` and `own_counters`, after the tensors have been filled."""

    def save(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Writes the drafter's folder, with facts about its origin."""


Found = tuple[tuple[int, ...], bool]
"""A response generated ahead: its tokens, and whether it is finished."""


class Ahead:
    """Generates responses of later steps in idle time. This base does nothing.

    num_offered: tokens generated ahead for the current step.
    """

    num_offered = 0

    def begin(self, queue: AheadQueue) -> None:
        """Begins a round, in which the replicas divide the requests by this queue."""

    def run(self, should_stop: Callable[[], bool]) -> AheadReport:
        """Generates until `should_stop` or until nothing is left. The engine is idle before and after. The
        caller measures the seconds."""
        return AheadReport()

    def take_found(self) -> dict[NoiseKey, Found]:
        """Returns the responses since the last call, for all replicas to keep."""
        return {}

    def keep(self, found: Iterable[Mapping[NoiseKey, Found]]) -> None:
        """Keeps the responses of all replicas as references."""

    def end(self) -> None:
        """Ends the phase, and drops its references."""


NO_AHEAD = Ahead()

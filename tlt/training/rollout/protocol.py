"""The interfaces of a rollout phase. The base classes do nothing, so a phase never checks for None.

Scorers           score responses, in processes (tasks/rewards/pool.py)
Journal           keeps responses and rewards on disk (training/saved/journal.py)
BetweenTurns      holds responses that wait for their environment (conversations.py)

Those of idle work stand in training/idle/protocol.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tlt.base.types import (
    Finished,
    Problem,
    Request,
    ResponseId,
    Reward,
    Rollout,
    Turns,
    num_drawn,
)
from tlt.engine.backend import Unfinished


class Scorers(Protocol):
    """by_group: a response has its reward only once its group is complete."""

    by_group: bool

    def submit(
        self,
        response_id: ResponseId,
        problem: Mapping[str, Any],
        text: str,
        token_ids: Sequence[int],
        step: int,
        turns: Turns | None = None,
    ) -> None:
        """Returns at once.

        text, token_ids: of the policy's last turn.
        step: policy updates before the policy that wrote the response.
        turns: the turns before, and the environment's own reward.
        """

    def complete(self, group: Sequence[ResponseId]) -> None:
        """All responses of a group are submitted; reward functions see them in this order."""

    def withdraw(self, response_ids: Iterable[ResponseId]) -> None:
        """Another rank scores these."""

    def collect(self) -> dict[ResponseId, Reward]: ...

    def drain(self, patience: float) -> dict[ResponseId, Reward]:
        """Waits for the missing rewards, at most `patience` seconds."""
        ...

    def abandon(self) -> None: ...


@dataclass(frozen=True)
class Recalled:
    """An earlier attempt's responses, and the remaining requests."""

    requests: Sequence[Sequence[Request]]
    """By unit. Unfinished responses carry their tokens so far."""
    rollouts: Sequence[Rollout] = ()
    rewards: Mapping[ResponseId, Reward] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        running = sum(num_drawn(request) for unit in self.requests for request in unit)
        return running + sum(map(num_drawn, self.rollouts))


class Journal:
    """A restarted run does not generate again what it holds."""

    def begin(self, phase: str, requests: Sequence[Sequence[Request]]) -> Recalled:
        """Every rank passes the same arguments. phase: unique among the run's phases."""
        return Recalled(requests)

    def note_running(self, responses: Sequence[Unfinished], at_once: bool = False) -> None:
        """After every engine step. at_once: writes every new token now."""

    def note_turn(self, request: Request) -> None:
        """Writes every new token and what the environment said. A written result is never asked again."""

    def note_finished(self, rollout: Rollout) -> None: ...

    def note_rewards(self, rewards: Mapping[ResponseId, Reward]) -> None: ...

    def close(self) -> None: ...


class BetweenTurns:
    """Responses between two turns, out of the engine."""

    lets_go_on = False
    """Whether a response that ends at a stop may have further turns."""

    def begin(
        self, problems: Iterable[Problem], requests: Iterable[Sequence[Request]], journal: Journal
    ) -> None: ...

    def take(self, finished: Finished) -> bool:
        """Whether the response waits for its environment; else it has ended."""
        return False

    @property
    def is_waiting(self) -> bool:
        return False

    @property
    def has_news(self) -> bool:
        """`collect` would return something."""
        return False

    def collect(self, timeout: float | None = 0.0) -> tuple[list[Request], list[Finished]]:
        """(responses that go on, responses that their environment ended). timeout: seconds to wait for the
        first; None: until it comes."""
        return [], []

    def abandon(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Sinks:
    scorers: Scorers
    decode: Callable[[Sequence[int]], str]
    """Response tokens → the text that is scored."""
    journal: Journal = field(default_factory=Journal)
    between_turns: BetweenTurns = field(default_factory=BetweenTurns)

"""The progress of a phase: what replicas have generated, and do now."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum


class Doing(StrEnum):
    GENERATE = "generating"
    TAKE_OVER = "taking over"
    AHEAD = "generating ahead"
    TRAIN = "training the drafter"
    REST = "resting"


@dataclass(frozen=True)
class ReplicaProgress:
    """finished: responses, the journal's included.
    longest: tokens of its longest running response; 0: none runs.
    """

    finished: int
    tokens: int
    longest: int
    doing: Doing

    def encode(self) -> str:
        return json.dumps(astuple(self))

    @staticmethod
    def decode(text: str) -> ReplicaProgress:
        finished, tokens, longest, doing = json.loads(text)
        return ReplicaProgress(finished, tokens, longest, Doing(doing))


@dataclass(frozen=True)
class PhaseProgress:
    """All replicas together.

    finished, total: responses.
    speed: recent tokens per second; None: unknown.
    doing: number of replicas by activity.
    """

    finished: int
    total: int
    speed: float | None
    longest: int
    doing: Mapping[Doing, int] = field(default_factory=dict)

    @staticmethod
    def of(replicas: Sequence[ReplicaProgress], total: int, speed: float | None) -> PhaseProgress:
        return PhaseProgress(
            sum(replica.finished for replica in replicas),
            total,
            speed,
            max((replica.longest for replica in replicas), default=0),
            Counter(replica.doing for replica in replicas),
        )

    @property
    def figures(self) -> str:
        parts = [f"{self.finished:,} / {self.total:,} responses"]
        if self.speed is not None:
            parts.append(f"{self.speed:,.0f} tok/s")
        if self.longest:
            parts.append(f"longest {self.longest:,} tokens")
        return " · ".join(parts)

    @property
    def ranks(self) -> str:
        """Empty if all generate."""
        if not any(self.doing.get(doing) for doing in Doing if doing is not Doing.GENERATE):
            return ""
        return "ranks: " + ", ".join(f"{num} {doing}" for doing in Doing if (num := self.doing.get(doing)))

    def __str__(self) -> str:
        return " · ".join(filter(None, (self.figures, self.ranks)))

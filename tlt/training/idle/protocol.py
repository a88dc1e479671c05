"""The interfaces of idle work. The base classes do nothing, so a phase never checks for None.

DrafterTraining   trains and measures the drafter (drafter_training.py)
Ahead             generates the next steps' responses (ahead.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt.base.records import AheadReport, DrafterCheck, DrafterReport
from tlt.base.types import Finished, NoiseKey, Rollout

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store


class DrafterTraining:
    @property
    def version(self) -> int:
        return 0

    def foresee(self, prompts: Iterable[Sequence[int]]) -> None:
        """prompts: of the next phase, the same on every rank."""

    def begin(self) -> None: ...

    @property
    def captures(self) -> bool:
        """The engine returns the target's features with finished responses."""
        return False

    def observe(self, finished: Finished) -> None: ...

    def train(self, should_stop: Callable[[], bool]) -> DrafterReport:
        """Until `should_stop`, or no data is left."""
        return DrafterReport()

    def publish_and_measure(
        self, rollouts: Sequence[Rollout], num_tokens: int, temperature: float
    ) -> DrafterCheck | None:
        """Averages the ranks' drafters, publishes the result and measures it. A collective; None without a
        drafter.

        rollouts: all ranks' responses of the phase.
        num_tokens: that this rank trained on.
        """
        return None

    def end(self, rollouts: Sequence[Rollout], seconds: float) -> None:
        """Keeps the next phase's training data. seconds: of this phase."""

    def abandon(self) -> None: ...

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def counters(self) -> dict[str, Any]:
        """State that all ranks share."""
        return {}

    def own_counters(self) -> dict[str, Any]:
        """State of this rank."""
        return {}

    def restore(self, counters: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """After the tensors have been filled."""

    def save(self, folder: Path, about: Mapping[str, Any]) -> None: ...


NO_TRAINING = DrafterTraining()

Found = tuple[tuple[int, ...], bool]
"""A response generated ahead: (its tokens, whether it is finished)."""


class Ahead:
    """num_offered: tokens generated ahead for the current step."""

    num_offered = 0

    def begin(self, store: Store) -> None:
        """store: the phase's, which all replicas share."""

    def run(self, should_stop: Callable[[], bool]) -> AheadReport:
        """Until `should_stop`, or nothing is left. The engine is idle before and after."""
        return AheadReport()

    def take_found(self) -> dict[NoiseKey, Found]:
        """Responses since the last call, for all replicas to keep."""
        return {}

    def keep(self, found: Iterable[Mapping[NoiseKey, Found]]) -> None: ...

    def end(self) -> None: ...


NO_AHEAD = Ahead()

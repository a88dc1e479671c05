"""The buffer of responses that the drafter is trained on: this step's, and the longest of the step before
(one-step-off).

Responses that finish early are short, and the longest lie on the replica that generates to the end. So after
every step the longest responses of all ranks stay for the next one. A response brings the features that were
captured while it was generated; they are used while the policy that made them is current, and then recomputed
by whoever trains. The buffer knows neither drafter nor target.

    oldest ─▶ tokens  tokens  tokens+features  tokens+features  tokens+features ◀─ latest        all within max_bytes
              over the limit, the oldest features leave first (they can be recomputed), then the oldest tokens
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.drafter.model import FIRST_PREDICTED, TOKEN_AHEAD, num_predicted, predicts_response
from tlt.types import Rollout

TOKEN_ID_BYTES = 8
"""Bytes counted for a token id in a tuple."""

NO_POLICY = -1
"""Version of the policy of features that do not exist."""

_MIN_WINDOW = 3
"""Tokens of the shortest window drawn, unless a trajectory has fewer."""


@dataclass(eq=False)
class Trajectory:
    """One response with its prompt.

    features_TF: what was captured of the target at its first T tokens (all but the last are needed), columns
        as the drafter's trainer wants them; None: never captured, or dropped to make room.
    policy_version: version of the policy that made the features, also of dropped ones; NO_POLICY: there never
        were any.
    is_captured: the features come from the engine's own forwards, not from a recomputation.
    """

    token_ids: tuple[int, ...]
    num_prompt: int
    policy_version: int = NO_POLICY
    features_TF: Tensor | None = None
    is_captured: bool = False

    @property
    def num_usable(self) -> int:
        """Number of tokens that have a feature: the last one never went through the target."""
        return len(self.token_ids) - 1

    @property
    def num_predicted(self) -> int:
        """Number of response tokens that a pair predicts: what there is to learn. The prompt is only read."""
        return num_predicted(self.num_prompt, len(self.token_ids))

    @property
    def num_bytes(self) -> int:
        return TOKEN_ID_BYTES * len(self.token_ids) + (
            0 if self.features_TF is None else self.features_TF.nbytes
        )


@dataclass(frozen=True)
class PackedBatch:
    """Windows of several trajectories, packed, with M pairs of token and feature (see model.py).

    token_ids_N, captured_NF: token ids, and what was captured of the target at each (columns as in
        `model.Captured`; on the target's device, all else on the CPU).
    lengths: tokens of each window.
    weight_M: 1 where a pair predicts a response token, else 0.
    num_captured: pairs whose features the engine captured while generating.
    """

    token_ids_N: Tensor
    captured_NF: Tensor
    lengths: tuple[int, ...]
    weight_M: Tensor
    num_captured: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.weight_M.numel())

    @property
    def num_predicted(self) -> int:
        return int(self.weight_M.sum())


def is_trainable(rollout: Rollout) -> bool:
    """Returns whether any pair of the response with its prompt predicts a token."""
    return len(rollout.prompt_ids) + len(rollout.token_ids) > FIRST_PREDICTED


class TrajectoryBuffer:
    """Trajectories in the order in which their tokens or features came, the latest last; bounded by bytes."""

    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        self.max_bytes = max_bytes
        self.trajectories: list[Trajectory] = []
        self._carried: list[Trajectory] = []  # those that the step started with
        self.random = random.Random(seed)

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(len(t.token_ids) for t in self.trajectories)

    @property
    def num_bytes(self) -> int:
        return sum(t.num_bytes for t in self.trajectories)

    def add(self, rollout: Rollout, features_TF: Tensor | None = None) -> None:
        """Adds a response and, where they were captured, its features under `rollout.policy_version`. A
        response that is not trainable is left out."""
        if not is_trainable(rollout):
            return
        token_ids = (*rollout.prompt_ids, *rollout.token_ids)
        is_captured = features_TF is not None
        version = rollout.policy_version if is_captured else NO_POLICY
        self.trajectories.append(
            Trajectory(token_ids, len(rollout.prompt_ids), version, features_TF, is_captured)
        )
        self._make_room()

    def renew(self, trajectory: Trajectory) -> None:
        """Makes a trajectory the latest, because its features have just been recomputed; it may have been
        dropped meanwhile."""
        self.trajectories = [*(t for t in self.trajectories if t is not trajectory), trajectory]
        self._make_room()

    def _make_room(self) -> None:
        excess = self.num_bytes - self.max_bytes
        for trajectory in self.trajectories:
            if excess > 0 and trajectory.features_TF is not None:
                excess -= trajectory.features_TF.nbytes
                trajectory.features_TF = None
        while excess > 0 and len(self.trajectories) > 1:
            excess -= self.trajectories.pop(0).num_bytes

    def carry_over(self, rollouts: Sequence[Rollout], num_longest: int) -> None:
        """Ends a step: keeps only the longest responses of all ranks, without features (those belong to
        the policy that is being replaced)."""
        self.trajectories.clear()
        longest = sorted(rollouts, key=lambda r: (-len(r.token_ids), r.problem_id, r.sample_index))[
            :num_longest
        ]
        for rollout in reversed(longest):
            self.add(rollout)
        self._carried = list(self.trajectories)

    def restore(self, carried: Iterable[tuple[tuple[int, ...], int]]) -> None:
        """Starts a step with these trajectories, pairs of (token ids, length of the prompt) that were
        carried over earlier."""
        self.trajectories = [Trajectory(tuple(token_ids), num_prompt) for token_ids, num_prompt in carried]
        self._carried = list(self.trajectories)

    def abandon(self) -> None:
        """Breaks a step off: drops what it added, and brings back what it started with, even what had to
        make room."""
        self.restore((t.token_ids, t.num_prompt) for t in self._carried)

    def ready(self, policy_version: int | None = None) -> list[Trajectory]:
        """Returns the trajectories that can be trained on at once: those with features of this policy
        (None: of any)."""
        return [
            t
            for t in self.trajectories
            if t.features_TF is not None and policy_version in (None, t.policy_version)
        ]

    def missing(self, policy_version: int) -> Trajectory | None:
        """Returns the longest trajectory that never had features of this policy; None when there is none.
        Features that had to make room are not asked for again while their policy is current: others as
        good would have to leave for them."""
        stale = [t for t in self.trajectories if t.policy_version != policy_version]
        return max(stale, key=lambda t: len(t.token_ids), default=None)

    def sample(self, token_budget: int, policy_version: int | None = None) -> PackedBatch | None:
        """Returns windows packed up to the budget, drawn so that every token is equally likely; None when no
        trajectory has features.

        A window lies anywhere in its trajectory where it predicts a response token; a trajectory that fits
        the budget is taken whole.
        """
        ready = self.ready(policy_version)
        if not ready:
            return None
        weights = [
            max(t.num_usable, token_budget) for t in ready
        ]  # what is taken whole need not be drawn more often
        tokens: list[int] = []
        features: list[Tensor] = []
        masks: list[Tensor] = []
        lengths: list[int] = []
        num_captured = 0
        left = token_budget
        while left >= _MIN_WINDOW or not lengths:
            trajectory = self.random.choices(ready, weights)[0]
            assert trajectory.features_TF is not None
            length = min(trajectory.num_usable, max(left, _MIN_WINDOW))
            start = self.random.randint(
                max(0, trajectory.num_prompt - length), trajectory.num_usable - length
            )
            window = slice(start, start + length)
            tokens.extend(trajectory.token_ids[window])
            features.append(trajectory.features_TF[window])
            lengths.append(length)
            num_captured += length - TOKEN_AHEAD if trajectory.is_captured else 0
            masks.append(predicts_response(trajectory.num_prompt, start, length).float())
            left -= length
            if left < trajectory.num_usable // 4 and left < token_budget // 4:
                break
        return PackedBatch(
            torch.tensor(tokens), torch.cat(features), tuple(lengths), torch.cat(masks), num_captured
        )

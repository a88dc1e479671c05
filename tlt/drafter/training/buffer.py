"""Responses for drafter training: this step's, and the longest of the step before (one-step-off).

    oldest ─▶ tokens  tokens  tokens+features  tokens+features  tokens+features ◀─ latest

Responses that finish early are short, so all ranks' longest stay for the next step. Captured features serve
until the policy changes. Beyond max_bytes, the oldest features go first, then the oldest tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.base.types import Rollout
from tlt.drafter.pairs import FIRST_PREDICTED, TOKEN_AHEAD, predicts_response

BUFFER_BYTES = 512 * 2**20
"""Of each rank; more responses than a rank trains on within a step."""
TOKEN_ID_BYTES = 8

NO_POLICY = -1
"""Policy version of absent features."""

_MIN_WINDOW = 3
"""Tokens of the shortest window, unless a trajectory has fewer."""


@dataclass(eq=False)
class Trajectory:
    """One response with its prompt.

    features_TF: columns of `training_capture` at all tokens but the last; None: never captured, or dropped.
    policy_version: of the features, also of dropped ones.
    is_captured: False: the features were recomputed.
    counted_bytes: its share of the buffer's sum.
    """

    token_ids: tuple[int, ...]
    num_prompt: int
    policy_version: int = NO_POLICY
    features_TF: Tensor | None = None
    is_captured: bool = False
    counted_bytes: int = 0

    @property
    def num_usable(self) -> int:
        """The target never read the last token."""
        return len(self.token_ids) - 1

    @property
    def num_predicted(self) -> int:
        return len(self.token_ids) - max(self.num_prompt, FIRST_PREDICTED)

    @property
    def num_bytes(self) -> int:
        features_bytes = 0 if self.features_TF is None else self.features_TF.nbytes
        return TOKEN_ID_BYTES * len(self.token_ids) + features_bytes


@dataclass(frozen=True)
class PackedBatch:
    """Windows of several trajectories, packed, with M pairs (pairs.py).

    captured_NF: columns of `training_capture`; on the target's device, all else on the CPU.
    weight_M: 1 where a pair predicts a response token, else 0.
    num_captured: pairs whose features were not recomputed.
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
    return len(rollout.prompt_ids) + len(rollout.token_ids) > FIRST_PREDICTED


class TrajectoryBuffer:
    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        self.max_bytes = max_bytes
        self.trajectories: list[Trajectory] = []
        self.num_bytes = 0
        self._num_dropped = 0  # number of oldest trajectories without features
        self._carried: list[Trajectory] = []  # at the start of the step
        self.random = random.Random(seed)

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(len(t.token_ids) for t in self.trajectories)

    def add(self, rollout: Rollout, features_TF: Tensor | None = None) -> None:
        """Features are of `rollout.policy_version`."""
        if not is_trainable(rollout):
            return
        token_ids = (*rollout.prompt_ids, *rollout.token_ids)
        is_captured = features_TF is not None
        version = rollout.policy_version if is_captured else NO_POLICY
        self._append(Trajectory(token_ids, len(rollout.prompt_ids), version, features_TF, is_captured))

    def renew(self, trajectory: Trajectory) -> None:
        """Makes a recomputed trajectory the latest, unless it was dropped meanwhile."""
        if trajectory in self.trajectories:
            place = self.trajectories.index(trajectory)
            del self.trajectories[place]
            self._num_dropped -= place < self._num_dropped
        self._append(trajectory)

    def drop_features(self, trajectory: Trajectory) -> None:
        trajectory.features_TF = None
        self._count(trajectory)

    def _append(self, trajectory: Trajectory) -> None:
        self.trajectories.append(trajectory)
        self._count(trajectory)
        while self.num_bytes > self.max_bytes and self._num_dropped < len(self.trajectories):
            self.drop_features(self.trajectories[self._num_dropped])
            self._num_dropped += 1
        num_gone = 0
        while self.num_bytes > self.max_bytes and num_gone < len(self.trajectories) - 1:
            oldest = self.trajectories[num_gone]
            self.num_bytes, oldest.counted_bytes = self.num_bytes - oldest.counted_bytes, 0
            num_gone += 1
        del self.trajectories[:num_gone]
        self._num_dropped = max(self._num_dropped - num_gone, 0)

    def _count(self, trajectory: Trajectory) -> None:
        self.num_bytes += trajectory.num_bytes - trajectory.counted_bytes
        trajectory.counted_bytes = trajectory.num_bytes

    def _start_with(self, trajectories: Iterable[Trajectory]) -> None:
        self.trajectories, self.num_bytes, self._num_dropped = [], 0, 0
        for trajectory in trajectories:
            self._append(trajectory)

    def carry_over(self, rollouts: Sequence[Rollout], num_longest: int) -> None:
        """Ends a step: keeps all ranks' longest responses, without features."""
        self._start_with(())
        longest_first = sorted(rollouts, key=lambda r: (-len(r.token_ids), r.problem_id, r.sample_index))
        for rollout in reversed(longest_first[:num_longest]):
            self.add(rollout)
        self._carried = list(self.trajectories)

    def restore(self, carried: Iterable[tuple[tuple[int, ...], int]]) -> None:
        """Starts a step with pairs (token ids, prompt length)."""
        self._start_with(Trajectory(tuple(token_ids), num_prompt) for token_ids, num_prompt in carried)
        self._carried = list(self.trajectories)

    def abandon(self) -> None:
        self.restore((t.token_ids, t.num_prompt) for t in self._carried)

    def ready(self, policy_version: int) -> list[Trajectory]:
        known = (t for t in self.trajectories if t.features_TF is not None)
        return [t for t in known if t.policy_version == policy_version]

    def missing(self, policy_version: int) -> Trajectory | None:
        """The longest trajectory that never had features of this policy. Features dropped to make room are
        not requested again: others would be dropped for them."""
        stale = [t for t in self.trajectories if t.policy_version != policy_version]
        return max(stale, key=lambda t: len(t.token_ids), default=None)

    def sample(self, token_budget: int, policy_version: int) -> PackedBatch | None:
        """Windows that make every token equally likely; None without features of this policy.

        A window predicts a response token.
        """
        ready = self.ready(policy_version)
        if not ready:
            return None
        # a draw yields all tokens of a trajectory that fits, so the lengths of these do not matter
        weights = [max(t.num_usable, token_budget) for t in ready]
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
            first_start = max(0, trajectory.num_prompt - length)
            start = self.random.randint(first_start, trajectory.num_usable - length)
            window = slice(start, start + length)
            tokens.extend(trajectory.token_ids[window])
            features.append(trajectory.features_TF[window])
            lengths.append(length)
            num_captured += length - TOKEN_AHEAD if trajectory.is_captured else 0
            masks.append(predicts_response(trajectory.num_prompt, start, length).float())
            left -= length
            if left < trajectory.num_usable // 4:
                break  # the rest of the budget would be a small part of a trajectory
        return PackedBatch(
            torch.tensor(tokens), torch.cat(features), tuple(lengths), torch.cat(masks), num_captured
        )

"""What the drafter is trained on: responses of this step, and the longest of the step before (one-step-off).

Those that finish early are short, and the longest lie on the replica that is busy to the end; so after every step the
longest token sequences of all ranks stay for the next one. Features captured while generating come along with the
tokens as long as the policy that made them is current; all others are recomputed by whoever trains.

    oldest ─▶ tokens  tokens  tokens+features  tokens+features  tokens+features ◀─ latest        all within max_bytes
              over the limit:  the oldest features go first (they can be recomputed), then the oldest tokens
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.types import Rollout

TOKEN_ID_BYTES = 8
"""Of a token id in a tuple."""

NO_POLICY = -1


@dataclass(eq=False)
class Trajectory:
    """One response with its prompt.

    features_TE: of the first T tokens (all but the last are needed), each a vector of whatever width the drafter learns
        from; None: there are none, or they had to make room.
    policy_version: of the policy that made the features, also of those that had to make room; NO_POLICY: there never were any.
    is_captured: the features come from the engine's own forwards, not from a recomputation.
    """

    token_ids: tuple[int, ...]
    num_prompt: int
    policy_version: int = NO_POLICY
    features_TE: Tensor | None = None
    is_captured: bool = False

    @property
    def num_usable(self) -> int:
        """Tokens that have a feature: the last one never went through the target."""
        return len(self.token_ids) - 1

    @property
    def num_predicted(self) -> int:
        """Response tokens that a pair predicts: what there is to learn. The prompt is only read."""
        return len(self.token_ids) - max(self.num_prompt, 2)

    @property
    def num_bytes(self) -> int:
        return TOKEN_ID_BYTES * len(self.token_ids) + (0 if self.features_TE is None else self.features_TE.nbytes)


@dataclass(frozen=True)
class PackedBatch:
    """Windows of several trajectories, packed: features on the target's device, all else on the CPU. `weight_M` marks the pairs
    that predict a response token (see models.drafter.align for what a pair is). num_captured: pairs whose features the engine
    captured."""

    token_ids_N: Tensor
    features_NE: Tensor
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
    """Returns whether a response, its prompt counted, is long enough to hold a pair."""
    return len(rollout.prompt_ids) + len(rollout.token_ids) >= 3


class TrajectoryBuffer:
    """Trajectories in the order in which their tokens or features came, the latest last; bounded by bytes."""

    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        self.max_bytes = max_bytes
        self.trajectories: list[Trajectory] = []
        self._carried: list[Trajectory] = []  # what the step started with
        self.random = random.Random(seed)

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(len(t.token_ids) for t in self.trajectories)

    @property
    def num_bytes(self) -> int:
        return sum(t.num_bytes for t in self.trajectories)

    def add(self, rollout: Rollout, features_TE: Tensor | None = None) -> None:
        """A response and, where they were captured, its features under `rollout.policy_version`. Responses too short to hold a
        pair are of no use and are left out."""
        if not is_trainable(rollout):
            return
        token_ids = (*rollout.prompt_ids, *rollout.token_ids)
        is_captured = features_TE is not None
        version = rollout.policy_version if is_captured else NO_POLICY
        self.trajectories.append(Trajectory(token_ids, len(rollout.prompt_ids), version, features_TE, is_captured))
        self._make_room()

    def renew(self, trajectory: Trajectory) -> None:
        """Its features have just been recomputed: it is the latest now, even if it had to leave meanwhile."""
        self.trajectories = [*(t for t in self.trajectories if t is not trajectory), trajectory]
        self._make_room()

    def _make_room(self) -> None:
        excess = self.num_bytes - self.max_bytes
        for trajectory in self.trajectories:
            if excess > 0 and trajectory.features_TE is not None:
                excess -= trajectory.features_TE.nbytes
                trajectory.features_TE = None
        while excess > 0 and len(self.trajectories) > 1:
            excess -= self.trajectories.pop(0).num_bytes

    def carry_over(self, rollouts: Sequence[Rollout], num_longest: int) -> None:
        """The step is over: keeps the longest responses of all ranks, without features (they belong to the policy that
        is being replaced)."""
        self.trajectories.clear()
        longest = sorted(rollouts, key=lambda r: (-len(r.token_ids), r.problem_id, r.sample_index))[:num_longest]
        for rollout in reversed(longest):
            self.add(rollout)
        self._carried = list(self.trajectories)

    def restore(self, carried: Iterable[tuple[tuple[int, ...], int]]) -> None:
        """Starts a step with these (token ids, length of the prompt), carried over before a restart."""
        self.trajectories = [Trajectory(tuple(token_ids), num_prompt) for token_ids, num_prompt in carried]
        self._carried = list(self.trajectories)

    def abandon(self) -> None:
        """The step was broken off: what it added goes, and what it started with comes back, even where it had to make room."""
        self.restore((t.token_ids, t.num_prompt) for t in self._carried)

    def ready(self, policy_version: int | None = None) -> list[Trajectory]:
        """Trajectories that can be trained on as they are: with features, of this policy (None: of any)."""
        return [t for t in self.trajectories if t.features_TE is not None and policy_version in (None, t.policy_version)]

    def missing(self, policy_version: int) -> Trajectory | None:
        """A trajectory that never had features of this policy, the longest first; None when there is none. Features of this
        policy that had to make room are not asked for again: others as good are there, and would have to leave for them."""
        stale = [t for t in self.trajectories if t.policy_version != policy_version]
        return max(stale, key=lambda t: len(t.token_ids), default=None)

    def sample(self, token_budget: int, policy_version: int | None = None) -> PackedBatch | None:
        """Windows packed up to the budget, drawn so that every token is as likely; None when no trajectory has features.

        A window lies anywhere in its trajectory where it predicts a response token; a trajectory that fits the budget is
        taken whole.
        """
        ready = self.ready(policy_version)
        if not ready:
            return None
        weights = [max(t.num_usable, token_budget) for t in ready]  # what is taken whole need not be drawn more often
        tokens: list[int] = []
        features: list[Tensor] = []
        masks: list[Tensor] = []
        lengths: list[int] = []
        num_captured = 0
        left = token_budget
        while left >= 3 or not lengths:
            trajectory = self.random.choices(ready, weights)[0]
            assert trajectory.features_TE is not None
            length = min(trajectory.num_usable, max(left, 3))
            start = self.random.randint(max(0, trajectory.num_prompt - length), trajectory.num_usable - length)
            window = slice(start, start + length)
            tokens.extend(trajectory.token_ids[window])
            features.append(trajectory.features_TE[window])
            lengths.append(length)
            num_captured += length - 1 if trajectory.is_captured else 0
            predicted = torch.arange(start + 2, start + length + 1)  # pair t predicts token t + 2
            masks.append((predicted >= trajectory.num_prompt).float())
            left -= length
            if left < trajectory.num_usable // 4 and left < token_budget // 4:
                break
        return PackedBatch(torch.tensor(tokens), torch.cat(features), tuple(lengths), torch.cat(masks), num_captured)

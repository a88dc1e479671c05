"""What the drafter is trained on: responses of this step, and the longest of the step before (one-step-off).

Those that finish early are short, and the longest lie on the replica that never falls idle; so after every step the
longest token sequences of all ranks stay for the next one. Features captured while generating come along with the
tokens as long as the policy that made them is current; all others are recomputed by whoever trains.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.types import Rollout


@dataclass
class Trajectory:
    """One response with its prompt. `features_TE` covers the first T tokens (all but the last are needed); None means
    that they have to be recomputed by the policy of `policy_version`."""

    token_ids: tuple[int, ...]
    num_prompt: int
    policy_version: int
    features_TE: Tensor | None = None

    @property
    def num_usable(self) -> int:
        """Tokens that have a feature: the last one never went through the target."""
        return len(self.token_ids) - 1


@dataclass(frozen=True)
class PackedBatch:
    """Windows of several trajectories, packed. `weight_M` marks the pairs that predict a response token
    (see models.drafter.align for what a pair is)."""

    token_ids_N: Tensor
    features_NE: Tensor
    lengths: tuple[int, ...]
    weight_M: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.weight_M.numel())


class TrajectoryBuffer:
    """Bounded by tokens: the oldest trajectories leave first."""

    def __init__(self, max_tokens: int, seed: int = 0) -> None:
        self.max_tokens = max_tokens
        self.trajectories: list[Trajectory] = []
        self.random = random.Random(seed)

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(len(t.token_ids) for t in self.trajectories)

    def add(self, rollout: Rollout, features_TE: Tensor | None = None) -> None:
        """Responses too short to hold a pair are of no use and are left out."""
        token_ids = (*rollout.prompt_ids, *rollout.token_ids)
        if len(token_ids) < 3:
            return
        self.trajectories.append(Trajectory(token_ids, len(rollout.prompt_ids), rollout.policy_version, features_TE))
        total = self.num_tokens
        while total > self.max_tokens and len(self.trajectories) > 1:
            total -= len(self.trajectories.pop(0).token_ids)

    def carry_over(self, rollouts: Sequence[Rollout], num_longest: int) -> None:
        """The step is over: keeps the longest responses of all ranks, without features (they belong to the policy that
        is being replaced)."""
        self.trajectories.clear()
        longest = sorted(rollouts, key=lambda r: (-len(r.token_ids), r.problem_id, r.sample_index))[:num_longest]
        for rollout in reversed(longest):
            self.add(rollout)

    def ready(self, policy_version: int | None = None) -> list[Trajectory]:
        """Trajectories that can be trained on as they are: with features, of this policy (None: of any)."""
        return [t for t in self.trajectories if t.features_TE is not None and policy_version in (None, t.policy_version)]

    def missing(self, policy_version: int) -> Trajectory | None:
        """A trajectory whose features are not those of this policy, the longest first; None when all are ready."""
        stale = [t for t in self.trajectories if t.features_TE is None or t.policy_version != policy_version]
        return max(stale, key=lambda t: len(t.token_ids), default=None)

    def sample(self, token_budget: int, policy_version: int | None = None) -> PackedBatch | None:
        """Windows drawn in proportion to length, packed up to the budget; None when no trajectory has features.

        A window lies anywhere in its trajectory where it predicts a response token; a trajectory that fits the budget is
        taken whole.
        """
        ready = self.ready(policy_version)
        if not ready:
            return None
        weights = [t.num_usable for t in ready]
        tokens: list[int] = []
        features: list[Tensor] = []
        masks: list[Tensor] = []
        lengths: list[int] = []
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
            predicted = torch.arange(start + 2, start + length + 1)  # pair t predicts token t + 2
            masks.append((predicted >= trajectory.num_prompt).float())
            left -= length
            if left < trajectory.num_usable // 4 and left < token_budget // 4:
                break
        return PackedBatch(torch.tensor(tokens), torch.cat(features), tuple(lengths), torch.cat(masks))

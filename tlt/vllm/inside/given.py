"""Drafts that are given to vLLM's scheduler instead of drafted by its proposer: how long they may be. Knows
no vLLM.

    a reference's next tokens ─▶ as many as there is room for ─▶ request.spec_token_ids ─▶ verified in this very step

vLLM holds a step's tokens to a budget, puts requests back for want of blocks, and computes the logits of
all rows at once. A draft is worth none of it, so each request has its share of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LOGITS_BYTES = 1 << 28
"""Memory for one copy of the logits of a step's drafted rows, in float32."""


@dataclass(frozen=True)
class Room:
    """What a step has for the drafts of `num_requests`.

    budget: tokens that a step may compute; drafts take half of it at most, and prompts keep the rest.
    free_blocks: of keys and values that nobody holds, in every group of layers.
    block_size: positions of a block.
    lookahead: positions behind the draft that vLLM's own drafter writes to.
    """

    num_requests: int
    budget: int
    free_blocks: int
    block_size: int
    lookahead: int
    vocab_size: int

    def tokens(self, num_computed: int) -> int:
        """Returns how many tokens may be drafted for a request of so many computed ones, so that vLLM puts
        none back for them. The blocks that it holds reach the end of its last one at least."""
        rows = LOGITS_BYTES // (4 * self.vocab_size * self.num_requests)
        blocks = -(-num_computed // self.block_size) + self.free_blocks // self.num_requests
        positions = (
            blocks * self.block_size - num_computed - 1 - self.lookahead
        )  # the last token is computed, too
        return max(min(self.budget // (2 * self.num_requests), rows, positions), 0)


class NoDrafts:
    """A proposer that proposes nothing, with which vLLM's first runner verifies what its scheduler is
    given."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, target: Any) -> None: ...

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]

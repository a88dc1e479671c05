"""Room for drafts that are given to vLLM's scheduler in place of its own proposer's, without vLLM.

    a reference's next tokens ─▶ as many as there is room for ─▶ request.spec_token_ids ─▶ verified now

vLLM limits the tokens of a step, preempts requests when blocks run out, and computes the logits of all rows
at once. A draft must not cost a preemption, so each request gets its share of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LOGITS_BYTES = 1 << 28
"""Memory for one copy of the logits of a step's drafted rows, in float32."""


@dataclass(frozen=True)
class Room:
    """A step's resources for drafts."""

    num_requests: int
    budget: int
    """Tokens that a step may compute. Drafts take at most half; the rest is for prompts."""
    free_blocks: int
    """Free blocks of the KV cache, in every group of layers."""
    block_size: int
    """Positions per block."""
    lookahead: int
    """Positions after the draft that vLLM's own drafter writes to."""
    vocab_size: int

    def tokens(self, num_computed: int) -> int:
        """Returns how many tokens may be drafted for a request with `num_computed` tokens without causing a
        preemption. Its blocks reach at least to the end of the last one."""
        rows = LOGITS_BYTES // (4 * self.vocab_size * self.num_requests)
        blocks = -(-num_computed // self.block_size) + self.free_blocks // self.num_requests
        positions = blocks * self.block_size - num_computed - 1 - self.lookahead  # 1: the last token
        return max(min(self.budget // (2 * self.num_requests), rows, positions), 0)


class NoDrafts:
    """A proposer that proposes nothing. With it vLLM's first runner verifies the drafts given to its
    scheduler."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, target: Any) -> None: ...

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]

"""Room for drafts that are given to vLLM's scheduler in place of its own proposer's, without vLLM.

    a reference's next tokens ─▶ as many as there is room for ─▶ request.spec_token_ids ─▶ verified now

vLLM limits the tokens of a step, preempts requests when blocks run out, and computes the logits of all rows
at once. A draft must not cost a preemption, so the requests share what is left: none gets less than an equal
share of it that it could use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

LOGITS_BYTES = 1 << 28
"""Memory for one copy of the logits of a step's drafted rows, in float32."""


class Verified(NamedTuple):
    """A draft that a step verified."""

    draft: Sequence[int] = ()
    num_accepted: int = 0
    """Its tokens that the target drew, too; those behind the response's end included."""


class Want(NamedTuple):
    """A running request that would verify a draft."""

    num_computed: int
    """Tokens whose keys and values are cached. Its blocks reach at least to the end of the last one."""
    num_drafted: int
    """Tokens of the draft; of a request that still reads its prompt, those that it has not read."""


@dataclass(frozen=True)
class Room:
    """A step's resources for drafts."""

    budget: int
    """Tokens that a step may compute. Drafts take at most half; the rest is for prompts."""
    free_blocks: int
    """Free blocks of the KV cache, in every group of layers."""
    block_size: int
    """Positions per block."""
    lookahead: int
    """Positions after the draft that vLLM's own drafter writes to."""
    vocab_size: int

    def share(self, wants: Mapping[str, Want]) -> dict[str, int]:
        """Returns how many tokens may be drafted for each of the running requests without causing a
        preemption."""
        blocks = shares({name: self._new_blocks(want) for name, want in wants.items()}, self.free_blocks)
        fitting = {name: self._fitting(want, blocks[name]) for name, want in wants.items()}
        rows = LOGITS_BYTES // (4 * self.vocab_size)
        return shares(fitting, min(self.budget // 2, self.budget - len(wants), rows))

    def _new_blocks(self, want: Want) -> int:
        held = -(-want.num_computed // self.block_size)
        return -(-(want.num_computed + 1 + want.num_drafted + self.lookahead) // self.block_size) - held

    def _fitting(self, want: Want, num_blocks: int) -> int:
        """Returns how much of a draft fits where the request gets `num_blocks` blocks more."""
        positions = (-(-want.num_computed // self.block_size) + num_blocks) * self.block_size
        return max(min(want.num_drafted, positions - want.num_computed - 1 - self.lookahead), 0)


def shares(wants: Mapping[str, int], total: int) -> dict[str, int]:
    """Returns how much of `total` each gets, by name: an equal share, or less where it wants less, which is
    then the others'."""
    found, left = {}, max(total, 0)
    for num_before, (name, want) in enumerate(sorted(wants.items(), key=lambda item: item[1])):
        found[name] = min(want, left // (len(wants) - num_before))
        left -= found[name]
    return found


class NoDrafts:
    """A proposer that proposes nothing. With it vLLM's first runner verifies the drafts given to its
    scheduler."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, target: Any) -> None: ...

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]

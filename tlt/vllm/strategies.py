"""What vLLM can draft of what was asked for: one drafter an engine, chains alone, and references. Starts
nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tlt.speculative.strategy import Strategy
from tlt.tuning.tuner import default_arms
from tlt.types import UserError


def check_references(device: str) -> None:
    """Raises UserError where vLLM cannot draft from references. device: "cpu" or "cuda"."""
    if not takes_drafts(device):
        raise UserError(NO_REFERENCES)


def takes_drafts(device: str) -> bool:
    """Returns whether vLLM's runner for a device takes drafts from its scheduler, where references are put
    in."""
    return device == "cpu"


NO_REFERENCES = (
    "engine: vllm keeps drafts on the GPU, where no reference can be put among them;"
    " leave out --references, --replay, rollout.ahead and strategies ahead…, or use engine tlt"
)


def check_speculation(speculation: str, has_learned: bool) -> None:
    """Raises UserError for a speculation that vLLM cannot carry out."""
    depths_of(speculation, kinds_of(speculation, has_learned), 1)


def kinds_of(speculation: str, has_learned: bool) -> tuple[str, ...]:
    """Returns the drafter that vLLM is started with, one at most: () where nothing is drafted, or from
    references alone."""
    if speculation == "off":
        return ()
    kind = "learned" if has_learned else "ngram"
    if speculation == "adaptive":
        return (kind,)
    strategy = Strategy.parse(speculation, kind)
    asked = strategy.drafter.partition("+")[2] if strategy.uses_references else strategy.drafter
    if not asked:
        return ()
    if asked == "hybrid" or (asked == "learned" and not has_learned):
        remedy = "give learned or ngram" if has_learned else "give a drafter, or ngram"
        raise UserError(
            f"speculation: {speculation!r} names the drafter {asked}, which engine vllm does not have here; "
            f"{remedy}"
        )
    return (asked,)


def depths_of(speculation: str, kinds: Sequence[str], max_draft_tokens: int) -> tuple[int, ...]:
    """Returns the numbers of tokens that may be drafted at a time, rising from 0. UserError for trees."""
    if not kinds:
        return (0,)
    if speculation == "adaptive":
        return tuple(sorted({arm.depth for arm in default_arms(kinds, max_draft_tokens, trees=False)}))
    strategy = Strategy.parse(speculation)
    if strategy.uses_references:
        return 0, strategy.without_reference.depth
    if strategy.width > 1 or strategy.budget > strategy.depth:
        chain = f"{strategy.depth}x1x{strategy.depth}"
        raise UserError(
            f"speculation: {speculation!r} is a tree, and vLLM drafts chains; give {chain}, or engine tlt"
        )
    return 0, strategy.depth

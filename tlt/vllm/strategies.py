"""What vLLM can draft of what was asked for: one drafter an engine, and chains alone. Starts nothing."""

from __future__ import annotations

from tlt.types import Strategy, UserError


def check_speculation(speculation: str, has_learned: bool) -> None:
    """Raises UserError for a speculation that vLLM cannot carry out."""
    kinds_of(speculation, has_learned)
    depth_of(speculation, 1)


def kinds_of(speculation: str, has_learned: bool) -> tuple[str, ...]:
    """Returns the drafter that vLLM is started with, one at most: () where nothing is drafted."""
    if speculation == "off":
        return ()
    kind = "learned" if has_learned else "ngram"
    if speculation == "adaptive":
        return (kind,)
    asked = Strategy.parse(speculation, kind).drafter
    if asked == "hybrid" or (asked == "learned" and not has_learned):
        remedy = "give learned or ngram" if has_learned else "give a drafter, or ngram"
        raise UserError(
            f"speculation: {speculation!r} names the drafter {asked}, which engine vllm does not have here; {remedy}"
        )
    return (asked,)


def depth_of(speculation: str, max_draft_tokens: int) -> int:
    """Returns how many tokens are drafted at most. UserError for trees."""
    if speculation in ("off", "adaptive"):
        return max_draft_tokens
    strategy = Strategy.parse(speculation)
    if strategy.width > 1 or strategy.budget > strategy.depth:
        chain = f"{strategy.depth}x1x{strategy.depth}"
        raise UserError(f"speculation: {speculation!r} is a tree, and vLLM drafts chains; give {chain}, or engine tlt")
    return strategy.depth

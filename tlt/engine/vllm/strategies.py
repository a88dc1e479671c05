"""The strategies that vLLM can carry out: chains of one drafter per engine."""

from __future__ import annotations

from collections.abc import Sequence

from tlt.base.speculation import Adaptive, Off, Speculation
from tlt.base.strategy import Strategy
from tlt.base.types import UserError
from tlt.drafter.shape import Method
from tlt.speculation.tuner.tuner import check_depth, default_arms


def check_speculation(speculation: Speculation, has_learned: bool) -> None:
    draft_depths(speculation, vllm_kinds(speculation, has_learned), 1)


def check_form(method: Method) -> None:
    if method == "dspark":
        raise UserError(
            "drafter: engine vllm drafts with no dspark drafter under our law (vLLM has them on GPUs alone); "
            "give a dflash drafter, or engine tlt"
        )


def vllm_kinds(speculation: Speculation, has_learned: bool) -> tuple[str, ...]:
    """At most one kind; (): vLLM drafts nothing."""
    if isinstance(speculation, Off):
        return ()
    kind = "learned" if has_learned else "ngram"
    if isinstance(speculation, Adaptive):
        return (kind,)
    asked = speculation.drafted_by(kind).drafter
    if asked not in (kind, "ngram"):
        remedy = "give learned or ngram" if has_learned else "give a drafter, or ngram"
        raise UserError(
            f"speculation: {str(speculation)!r} names the drafter {asked}, which engine vllm does not "
            f"have here; {remedy}"
        )
    return (asked,)


def draft_depths(
    speculation: Speculation, kinds: Sequence[str], max_draft_tokens: int, block: int = Strategy.MAX_DEPTH
) -> tuple[int, ...]:
    """Lengths rise from 0. Raises UserError for trees, and for drafts longer than a block.

    block: most tokens that the drafter drafts.
    """
    if isinstance(speculation, Off):
        return (0,)
    if isinstance(speculation, Adaptive):
        most = min(max_draft_tokens, block)
        return tuple(sorted({arm.depth for arm in default_arms(kinds, most, trees=False)}))
    strategy = speculation.strategy
    if strategy.width > 1 or strategy.budget > strategy.depth:
        chain = f"{strategy.depth}x1x{strategy.depth}"
        raise UserError(
            f"speculation: {str(speculation)!r} is a tree, and vLLM drafts chains; give {chain} (engine "
            "tlt drafts trees)"
        )
    check_depth(strategy, block)
    return 0, strategy.depth

"""A response of several turns for the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tlt.apps.page.tokens import MAX_CHARACTERS, MAX_SHOWN_TOKENS, clip, drafts_within
from tlt.base.io.files import Record
from tlt.base.types import DraftOutcome, Turns

MAX_TURNS = 40
"""Turns shown of a response, half at its beginning and half at its end."""
LEAST_CHARACTERS = 200
"""Characters shown of each part, however many there are."""


def own_stretches(turns: Turns, num_tokens: int) -> list[tuple[int, int]]:
    edges = [0, *(place for stretch in turns.given for place in stretch), num_tokens]
    return [*pairwise(edges)][::2]


def describe(turns: Turns) -> str:
    num_turns = len(turns.given) + 1
    num_calls = f"{turns.num_calls or 'no'} call{'s' * (turns.num_calls != 1)}"
    calls = f"{num_turns} turn{'s' * (num_turns > 1)}, {num_calls}"
    if turns.num_errors:
        calls += f" ({turns.num_errors} failed, {turns.num_timeouts} of them by time-out)"
    waited = f"waited {turns.seconds:.3g} s for tools and environment"
    return f"{calls}; {turns.num_given} tokens were given; {waited}."


def show_turns(
    turns: Turns,
    last_turn: str,
    num_tokens: int,
    pieces: Sequence[str] | None,
    drafts: Sequence[DraftOutcome],
    name_of: Callable[[int], str],
) -> list[Record]:
    """Returns the parts of the conversation in order: "model", "tool", "error" or "environment", label and
    text.

    pieces: texts of all tokens; None: the turns are shown by their messages, not coloured.
    """
    rounds = [*_rounds(turns.messages), ({"content": last_turn}, [])]
    stretches = own_stretches(turns, num_tokens)
    shown = [*zip(range(1, len(stretches) + 1), rounds, stretches, strict=False)]
    most = max(MAX_CHARACTERS // min(len(shown), MAX_TURNS), LEAST_CHARACTERS)
    parts = list[Record]()
    for place, (number, (spoken, replies), stretch) in enumerate(shown):
        if len(shown) > MAX_TURNS and MAX_TURNS // 2 <= place < len(shown) - MAX_TURNS // 2:
            if place == MAX_TURNS // 2:
                left_out = f"[… {len(shown) - MAX_TURNS} turns …]"
                parts.append({"by": "environment", "label": "", "text": left_out})
            continue
        part: Record = {"by": "model", "label": f"turn {number}"}
        if pieces is None:
            parts.append(part | {"text": clip(_text_of(spoken), characters=most)[0]})
        else:
            most_tokens = max(MAX_SHOWN_TOKENS // min(len(shown), MAX_TURNS), 2)
            parts.append(part | _coloured(pieces, drafts, stretch, name_of, most, most_tokens))
        parts += [_reply(message, most) for message in replies]
    return parts


def _coloured(
    pieces: Sequence[str],
    drafts: Sequence[DraftOutcome],
    stretch: tuple[int, int],
    name_of: Callable[[int], str],
    most: int,
    most_tokens: int,
) -> Record:
    first, end = stretch
    text, places = clip(pieces[first:end], most_tokens, most)
    moved = [(first + start, lengths) for start, lengths in places]
    own = [_until(end, draft) for draft in drafts if first <= draft.place < end]
    return {"text": text, "stretches": moved, "drafts": drafts_within(own, moved, name_of), "tokens": end}


def _until(end: int, draft: DraftOutcome) -> DraftOutcome:
    if draft.place + draft.num_accepted < end:
        return draft
    return draft._replace(num_accepted=end - draft.place, rejected=None)


def _rounds(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], list[Any]]]:
    """Yields (the policy's turn, the replies to it)."""
    spoken: Mapping[str, Any] | None = None
    replies: list[Any] = []
    for message in messages:
        if message.get("role") == "assistant":
            if spoken is not None:
                yield spoken, replies
            spoken, replies = message, []
        else:
            replies.append(message)
    if spoken is not None:
        yield spoken, replies


def _text_of(spoken: Mapping[str, Any]) -> str:
    calls = [json.dumps(call, ensure_ascii=False) for call in spoken.get("tool_calls") or ()]
    return "\n".join(filter(None, [str(spoken.get("content") or ""), *calls]))


def _reply(message: Mapping[str, Any], most: int) -> Record:
    content, name = str(message.get("content", "")), str(message.get("name", ""))[:100]
    if message.get("role") != "tool":
        by, label = "environment", "the environment says"
    elif content.startswith('{"error": '):
        by, label = "error", f"{name}: error"
    else:
        by, label = "tool", f"{name}: result"
    return {"by": by, "label": label, "text": clip(content, characters=most)[0]}

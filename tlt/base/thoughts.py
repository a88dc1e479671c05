"""The thoughts of reasoning models, `<think>…</think>` and the like.

Reward workers run this file: it imports nothing.
"""

from __future__ import annotations

CLOSING_TAGS = ("</think>", "</thinking>", "</thought>", "[/THINK]", "</seed:think>", "<|end_of_thought|>")


def opening_tag(closing_tag: str) -> str:
    return closing_tag.replace("end_of", "begin_of").replace("/", "", 1)


OPENING_TAGS = tuple(map(opening_tag, CLOSING_TAGS))
TAGS = frozenset(OPENING_TAGS + CLOSING_TAGS)


def after_thinking(text: str, closing_tag: str | None = None, in_thought: bool = False) -> str:
    """Returns the text after the last thought; "" if the text ends within a thought.

    closing_tag: such as `</think>`; "": there are no thoughts; None: any of CLOSING_TAGS.
    in_thought: whether the prompt has opened a thought.
    """
    if closing_tag == "":
        return text
    tags = CLOSING_TAGS if closing_tag is None else (closing_tag,)
    start = max((text.rfind(tag) + len(tag) for tag in tags if tag in text), default=None)
    if start is None and in_thought:
        return ""
    rest = text[start or 0 :]
    return "" if any(opening_tag(tag) in rest for tag in tags) else rest


def ends_in_thought(text: str) -> bool:
    """Whether a prompt opens a thought, as chat templates of reasoning models do."""
    return any(text.rfind(opening_tag(tag)) > text.rfind(tag) for tag in CLOSING_TAGS)

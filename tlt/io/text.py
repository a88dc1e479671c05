"""Foreign text made safe for a terminal and a log."""

from __future__ import annotations

from unicodedata import category

from tlt.io.secrets import hide


def visible(text: str) -> str:
    """Returns the text with an escape such as \\x1b for each character that controls a terminal or is
    invisible. Tabs and line ends stay."""
    if text.isprintable():
        return text
    kinds = (
        "Cc",
        "Cf",
        "Cs",
        "Zl",
        "Zp",
    )  # control, format, half a character, separators of lines, paragraphs
    return "".join(
        c.encode("unicode_escape").decode() if c not in "\n\t" and category(c) in kinds else c for c in text
    )


def one_line(error: BaseException, limit: int = 10_000) -> str:
    """Returns kind and message of an exception on one line of bounded length, without credentials."""
    text = visible(" ".join(hide(f"{type(error).__name__}: {message_of(error)}").split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def message_of(error: BaseException) -> str:
    """Returns an exception's message; empty where the __str__ of a user's exception fails."""
    try:
        return str(error)
    except Exception:  # a user's __str__ may raise anything
        return ""

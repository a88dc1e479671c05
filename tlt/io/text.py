"""Text of the user's and of others, made fit for a terminal and a log."""

from __future__ import annotations

from unicodedata import category


def visible(text: str) -> str:
    """Returns a text for a terminal or a log: what would steer a terminal, or hide there, as an escape
    such as \\x1b. Tabs and ends of lines stay."""
    if text.isprintable():
        return text
    kinds = {
        "Cc",
        "Cf",
        "Cs",
        "Zl",
        "Zp",
    }  # control, format, half a character, separators of lines and paragraphs
    steers = (c not in "\n\t" and category(c) in kinds for c in text)
    return "".join(
        c.encode("unicode_escape").decode() if is_one else c for c, is_one in zip(text, steers, strict=True)
    )


def one_line(error: BaseException, limit: int = 10_000) -> str:
    """Returns kind and message of an exception on one line of bounded length."""
    text = visible(" ".join(f"{type(error).__name__}: {message_of(error)}".split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def message_of(error: BaseException) -> str:
    """Returns an exception's message; empty where the exception, the user's own, cannot say it."""
    try:
        return str(error)
    except Exception:  # whatever the user's __str__ raises
        return ""

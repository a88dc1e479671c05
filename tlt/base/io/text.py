"""Foreign text made safe for a terminal and a log."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Final
from unicodedata import category

from tlt.base.io.secrets import hide

_HIDDEN: Final = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories: control, format, half a character, separators of lines and of paragraphs."""


def visible(text: str) -> str:
    """Returns the text with an escape such as \\x1b for each character that controls a terminal or is
    invisible. Tabs and line ends stay."""
    if text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if c not in "\n\t" and category(c) in _HIDDEN else c for c in text
    )


def visible_json(text: str) -> str:
    """Returns JSON on one line with JSON's own escape for each such character: it reads as the same value."""
    if text.isprintable():
        return text
    return "".join(json.dumps(c)[1:-1] if category(c) in _HIDDEN else c for c in text)


def quoted(path: Path | str) -> str:
    """Returns a path as a shell takes it, for a command that a message asks to type."""
    return shlex.quote(visible(str(path)))


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

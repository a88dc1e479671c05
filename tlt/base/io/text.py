"""Foreign text made safe to print."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Final
from unicodedata import category

from tlt.base.io.secrets import hide

_HIDDEN: Final = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: control, format, surrogate, line and paragraph separators."""


def visible(text: str) -> str:
    """Escapes (\\x1b) characters that control a terminal or are invisible, except tabs and line ends."""
    if text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if c not in "\n\t" and category(c) in _HIDDEN else c for c in text
    )


def visible_json(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(json.dumps(c)[1:-1] if category(c) in _HIDDEN else c for c in text)


def quoted(path: Path | str) -> str:
    return shlex.quote(visible(str(path)))


def one_line(error: BaseException, limit: int = 10_000) -> str:
    """Returns type and message, without credentials."""
    text = visible(" ".join(hide(f"{type(error).__name__}: {message_of(error)}").split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's __str__ may raise anything
        return ""

"""Credentials in text: found before they are written down, hidden in what is printed. Knows no configuration.

https://me:pass@host · hf_… · sk-… · ghp_… · the value of a variable such as HF_TOKEN or WANDB_API_KEY
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_KNOWN = re.compile(
    r"(?<=:/)/?[^\s/:@]*:[^\s/@]+(?=@)"  # of a URL, of whose slashes a path keeps one
    r"|\b(?:hf_|sk-|gh[opsu]_|github_pat_|wandb_v1_)[\w-]{20,}",
    re.ASCII,
)
_VARIABLE = re.compile(r"(TOKEN|API_?KEY|PASSWORD|SECRET)$")
_SHORTEST = 8
"""Characters of a variable's value, from which on it is taken for a credential and not for a switch."""


def hide(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the text with *** where a credential stood."""
    text = _KNOWN.sub("***", text)
    for name, value in environ.items():
        if _VARIABLE.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    return text


def holds_credential(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    return hide(text, environ) != text

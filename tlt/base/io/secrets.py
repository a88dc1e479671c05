"""Finds credentials in text, and hides them.

    https://me:pass@host · ?api_key=… · Bearer … · hf_… · sk-… · ghp_… · AKIA… · the value of HF_TOKEN

A variable's value is a credential by the variable's name; a …_KEY also needs a value that looks random.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

_KNOWN = re.compile(
    r"(?<=:/)/?[^\s/:@]*:[^\s/@]+(?=@)"  # of a URL; a path keeps only one of its slashes
    r"|(?<=[?&])(?:api[_-]?key|access[_-]?token|auth[_-]?token|token|password|client[_-]?secret|secret|sig"
    r"|X-Amz-Signature|X-Amz-Security-Token)=[^\s&#]{8,}"  # of a URL's query
    r"|\bBearer\s+(?=\S*\d)[\w.~+/=-]{16,}"  # of an HTTP header
    r"|(?<![A-Za-z0-9])(?:"
    r"(?:hf_|api_org_)[A-Za-z0-9]{30,}"  # Hugging Face
    r"|sk-(?=[\w-]{20,})[\w-]*?[A-Za-z0-9]{16,}[\w-]*"  # OpenAI, Anthropic and others
    r"|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"  # GitHub
    r"|gl(?:pat|dt|rt|cbt|ptt|ft|soat|oas|agent)-[\w-]{20,}"  # GitLab
    r"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])"  # AWS, the key's name
    r"|AIza[\w-]{35}|ya29\.[\w-]{20,}"  # Google
    r"|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}"  # Slack
    r"|wandb_v1_[\w-]{20,}|nvapi-[\w-]{20,}|gsk_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{30,}|r8_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{50,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"  # JSON Web Token
    r")"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?",
    re.ASCII,
)
_IS_SECRET = re.compile(
    r"(?:TOKEN|API_?KEY|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL)S?$|_(?:PASS|PWD)$",
    re.ASCII | re.IGNORECASE,
)
_MAY_BE_SECRET = re.compile(r"(?:^|_)KEY$|(?:^|_)(?:SECRET|TOKEN|PASS|PASSWORD)_", re.ASCII | re.IGNORECASE)
_SHORTEST = 8
"""Shorter values are switches."""
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])\S{16,}", re.ASCII)


def hide(text: str, environ: Mapping[str, str] = os.environ) -> str:
    text = _KNOWN.sub("***", text)
    for value in _values(environ):
        text = text.replace(value, "***")
    return text


def holds_credential(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    return hide(text, environ) != text


def _values(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in environ.items():
        is_secret = _IS_SECRET.search(name) and len(value) >= _SHORTEST
        looks_secret = _MAY_BE_SECRET.search(name) and _RANDOM.fullmatch(value)
        if (is_secret or looks_secret) and not os.path.exists(value):
            yield value

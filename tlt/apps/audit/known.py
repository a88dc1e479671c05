"""Known faults of other engines, which a verdict names. A server does not tell its device, so the text
does."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

from tlt.base.io.files import parse_json

_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class Server:
    version: str
    drafts: bool


def identify(url: str) -> Server | None:
    """None: the server is no vLLM."""
    root = url.rstrip("/").removesuffix("/v1")
    try:
        found = parse_json(_get(f"{root}/version"))
        metrics = _get(f"{root}/metrics")
    except (OSError, ValueError, HTTPException):
        return None
    if not isinstance(found, dict) or not isinstance(version := found.get("version"), str):
        return None
    return Server(version, "vllm:spec_decode_num_draft" in metrics)


def known_fault(server: Server, temperature: float) -> str | None:
    if temperature == 0 or not server.drafts or not server.version.startswith("0.32."):
        return None
    return (
        f"vLLM {server.version} with drafts, sampling on its own: on a CPU this is vllm issue 55005 (draft "
        "rows are divided by uninitialized memory), a known bug of vLLM's CPU builds and not of vLLM on GPUs"
    )


def _get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as answer:
        text: str = answer.read().decode(errors="replace")
    return text

"""Faults of other engines that are known by name, so that a verdict can say which one it has probably met.
Knows no statistics.

A server tells its version (`/version`) and that it drafts (`/metrics`), but not what it computes on: the
sentence names that.
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass

_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class Server:
    """What a server says of itself. version: of vLLM.
    drafts: whether it has counters of speculative decoding."""

    version: str
    drafts: bool


def describe(url: str) -> Server | None:
    """Asks a server what it is; None where it does not say so as vLLM does."""
    root = url.rstrip("/").removesuffix("/v1")
    try:
        found = json.loads(_get(f"{root}/version"))
        metrics = _get(f"{root}/metrics")
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not isinstance(version := found.get("version"), str):
        return None
    return Server(version, "vllm:spec_decode_num_draft" in metrics)


def known_fault(server: Server, temperature: float) -> str | None:
    """Returns the known fault under which a server that is not lossless would look so; None: there is
    none."""
    if temperature > 0 and server.drafts and server.version.startswith("0.32."):
        return (
            f"vLLM {server.version} with drafts, sampling on its own: on a CPU this is vllm issue 55005 "
            "(draft rows are divided"
            " by uninitialized memory), a known bug of vLLM's CPU builds and not of vLLM on GPUs"
        )
    return None


def _get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as answer:
        text: str = answer.read().decode(errors="replace")
    return text

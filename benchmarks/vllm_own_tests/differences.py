"""Why a test of vLLM's that passes without our plug-in does not where the plug-in is awake."""

from __future__ import annotations

from collections.abc import Mapping

_LOGITS = (
    "asks for logits (`--logprobs-mode raw_logits`, `processed_logits`), which a server with the law refuses"
)
BY_DESIGN: Mapping[str, str] = {
    "tests/v1/sample/test_logprobs.py::test_logprobs_mode[raw_logits]": _LOGITS,
    "tests/v1/sample/test_logprobs.py::test_logprobs_mode[processed_logits]": _LOGITS,
}
"""By the beginning of FILE::TEST, the reason."""


def reason_for(file: str, test: str) -> str | None:
    """Returns why this test does not pass awake; None: it should. file: may name a function, too."""
    name = f"{file.partition('::')[0]}::{test}"
    return next((reason for start, reason in BY_DESIGN.items() if name.startswith(start)), None)

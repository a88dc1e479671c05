"""The law as a plug-in of vLLM: whoever starts an engine with `additional_config={"tlt": {}}` samples by it.

    vllm serve MODEL --additional-config '{"tlt": {}}'          the same seed gives the same text, drafted or not, alone or not

vLLM loads it by its entry point in every process. It changes nothing where nobody asked for it. docs/vllm.md says what for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tlt.vllm import runner_v1
from tlt.vllm.capture import Captured
from tlt.vllm.law import DEFAULT_TAU, LawTable

CONFIG = "tlt"
"""The key of vLLM's `additional_config`: {"tau": temperature of the drafter, "captures": whether features are kept}."""

PROCESSOR = "tlt.vllm.runner_v2:LawProcessor"


@dataclass(frozen=True)
class Installed:
    """What a worker's runner has got. captured: None where the drafter's features are not kept."""

    table: LawTable
    captured: Captured | None


def register() -> None:
    """Lets workers install the law when they load their model. It may be called several times."""
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.load_model
    if original.__module__ == __name__:
        return

    @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__"))
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = (self.vllm_config.additional_config or {}).get(CONFIG)
        if asked is not None and self.vllm_config.use_v2_model_runner:
            config = self.vllm_config.model_config
            config.logits_processors = [*(config.logits_processors or []), PROCESSOR]
        original(self, *args, **kwargs)
        if asked is not None:
            self.model_runner.tlt = install(self.model_runner, asked)

    Worker.load_model = load_model


def install(runner: Any, asked: dict[str, Any]) -> Installed:
    """Puts the law into a runner that has loaded its model."""
    tau = float(asked.get("tau", DEFAULT_TAU))
    if runner.vllm_config.use_v2_model_runner:
        from tlt.vllm import runner_v2

        return Installed(runner_v2.install(runner, tau), None)
    batch = runner_v1.install(runner, tau)
    return Installed(batch.table, Captured(runner, batch) if asked.get("captures") else None)

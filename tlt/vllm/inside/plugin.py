"""The law as a plug-in of vLLM: whoever starts an engine with `additional_config={"tlt": {}}` samples by it.

    vllm serve MODEL --additional-config '{"tlt": {}}'          the same seed gives the same text, drafted or not, alone or not

vLLM loads it by its entry point in every process. It changes nothing where nobody asked for it.
docs/vllm.md says what for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tlt.types import UserError
from tlt.vllm.inside import runner_v1
from tlt.vllm.inside.capture import Captured
from tlt.vllm.inside.law import DEFAULT_TAU, LawTable
from tlt.vllm.inside.served import CONFIG as CONFIG
from tlt.vllm.inside.served import asked, check_request, check_server, seed_of

PROCESSOR = "tlt.vllm.inside.runner_v2:LawProcessor"


@dataclass(frozen=True)
class Installed:
    """What a worker's runner has got. captured: None where the drafter's features are not kept."""

    table: LawTable
    captured: Captured | None


def register() -> None:
    """Lets vLLM check what it starts with and what is asked of it, and lets workers install the law when
    they load their model. It may be called several times."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu_worker import Worker

    _wrap(EngineArgs, "create_engine_config", _create_engine_config)
    _wrap(InputProcessor, "process_inputs", _process_inputs)
    _wrap(Worker, "load_model", _load_model)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replaces a method by around(method, self, …), once."""
    method = getattr(owner, name)
    if method.__module__ == __name__:
        return

    @functools.wraps(method, assigned=("__name__", "__qualname__", "__doc__"))
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(method, self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _create_engine_config(method: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    config = method(self, *args, **kwargs)
    check_server(config)
    return config


def _process_inputs(
    method: Callable[..., Any],
    self: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    from vllm.exceptions import VLLMValidationError

    request = method(self, request_id, prompt, params, *args, **kwargs)
    if asked(self.vllm_config) is not None and request.sampling_params is not None:
        try:
            check_request(self.vllm_config, request.sampling_params)
        except UserError as error:
            raise VLLMValidationError(
                str(error)
            ) from None  # of vLLM's own kind: a server answers with 400, not with 500
        request.sampling_params.seed = seed_of(
            request.sampling_params
        )  # vLLM's own copy of the caller's parameters
    return request


def _load_model(method: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    from vllm.logger import init_logger

    given = asked(self.vllm_config)
    if given is not None and self.vllm_config.use_v2_model_runner:
        config = self.vllm_config.model_config
        config.logits_processors = [*(config.logits_processors or []), PROCESSOR]
    method(self, *args, **kwargs)
    if given is not None:
        self.model_runner.tlt = install(self.model_runner, given)
        init_logger("vllm.tlt").info("Tokens are drawn by tlt's law: a request's seed alone decides them.")


def install(runner: Any, given: dict[str, Any]) -> Installed:
    """Puts the law into a runner that has loaded its model."""
    tau = float(given.get("tau", DEFAULT_TAU))
    if runner.vllm_config.use_v2_model_runner:
        from tlt.vllm.inside import runner_v2

        return Installed(runner_v2.install(runner, tau), None)
    batch = runner_v1.install(runner, tau)
    return Installed(batch.table, Captured(runner, batch) if given.get("captures") else None)

"""The law as a plug-in of vLLM, which loads it by its entry point in every process (docs/vllm.md).

    vllm serve MODEL --additional-config '{"tlt": {}}'

Without that key it changes nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tlt.base.types import UserError
from tlt.engine.vllm.inside import block_v1, drafter_v1, runner_v1
from tlt.engine.vllm.inside.admission import admit, check_server, law_config
from tlt.engine.vllm.inside.block_weights import mend_key_norms
from tlt.engine.vllm.inside.capture import FeatureCapture
from tlt.engine.vllm.inside.law import DEFAULT_TAU, LawTable
from tlt.engine.vllm.inside.unread import UnreadPositions

PROCESSOR = "tlt.engine.vllm.inside.runner_v2:LawProcessor"


@dataclass(frozen=True)
class InstalledLaw:
    """A model runner's attribute `tlt`."""

    table: LawTable
    capture: FeatureCapture | None
    unread: UnreadPositions | None = None
    """None: there is no drafter, or it runs in every step."""


def register() -> None:
    """vLLM then checks configurations and requests, and installs the law as it loads a model. May be called
    again."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu_worker import Worker

    _wrap(EngineArgs, "create_engine_config", _create_engine_config)
    _wrap(InputProcessor, "process_inputs", _process_inputs)
    _wrap(Scheduler, "update_from_output", _update_from_output)
    _wrap(Worker, "load_model", _load_model)
    _wrap(type(current_platform), "register_triton_kernel_overrides", _register_kernels)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
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


def _process_inputs(method: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    request = method(self, *args, **kwargs)
    params = request.sampling_params  # vLLM's own copy of the caller's
    if law_config(self.vllm_config) is not None and params is not None:
        try:
            admit(self.vllm_config, params)
        except UserError as error:  # as vLLM's own kind of error: a server answers with 400, not with 500
            raise VLLMValidationError(str(error)) from None
    return request


def _update_from_output(method: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The scheduler reports drafts when it ends a request, but a stop text ends it in vLLM's frontend:
    such requests get reports in every step."""
    outputs = method(self, *args, **kwargs)
    if law_config(self.vllm_config) is not None and self.spec_decode_metrics_level != "none":
        for output in (one for each in outputs.values() for one in each.outputs):
            request = self.requests.get(output.request_id)
            if request is not None and request.sampling_params is not None and request.sampling_params.stop:
                output.spec_decode_metrics = request.spec_decode_metrics
    return outputs


def _register_kernels(method: Callable[..., Any], self: Any) -> None:
    """vLLM searches all modules for kernels, and fails over Numba's library: no second engine could start."""
    holder = vars(sys.modules.get("llvmlite.binding.ffi", ModuleType("none")))
    library = holder.pop("lib", None)
    try:
        method()  # bound to the platform's class
    finally:
        if library is not None:
            holder["lib"] = library


def _load_model(method: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    from vllm.logger import init_logger

    given = law_config(self.vllm_config)
    if given is not None and self.vllm_config.use_v2_model_runner:
        config = self.vllm_config.model_config
        config.logits_processors = [*(config.logits_processors or []), PROCESSOR]
    method(self, *args, **kwargs)
    if given is not None:
        self.model_runner.tlt = _install(self.model_runner, given)
        init_logger("vllm.tlt").info("Tokens are drawn by tlt's law: a request's seed alone decides them.")


def _install(runner: Any, given: dict[str, Any]) -> InstalledLaw:
    tau, drafts = float(given.get("tau", DEFAULT_TAU)), runner.vllm_config.speculative_config
    reads_hidden = drafts is not None and drafts.method in ("eagle", "eagle3", "dflash")
    is_dflash, is_v2 = drafts is not None and drafts.use_dflash(), runner.vllm_config.use_v2_model_runner
    if is_dflash and runner.device.type == "cpu":
        mend_key_norms((runner.speculator if is_v2 else runner.drafter).model.model)
    if is_v2:
        from tlt.engine.vllm.inside import drafter_v2, runner_v2

        table = runner_v2.install_v2(runner, tau)
        may_sleep = reads_hidden and _may_sleep(drafter_v2.why_awake_v2(runner))
        return InstalledLaw(table, None, drafter_v2.DrafterV2(runner, table).unread if may_sleep else None)
    batch = runner_v1.install_v1(runner, tau)
    if is_dflash:
        block_v1.BlockDrafter(runner, batch)
    may_sleep = reads_hidden and _may_sleep(drafter_v1.why_awake_v1(runner))
    unread = drafter_v1.DrafterV1(runner, batch).unread if may_sleep else None
    capture = FeatureCapture(runner, batch) if given.get("captures") else None
    return InstalledLaw(batch.table, capture, unread)


def _may_sleep(reason: str | None) -> bool:
    from vllm.logger import init_logger

    if reason is not None:
        init_logger("vllm.tlt").warning("The drafter runs in steps without drafts, too: %s.", reason)
    return reason is None

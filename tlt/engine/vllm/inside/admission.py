"""Refuses what the law cannot serve, in one sentence: a server at its start, a request with HTTP 400.

vllm serve ─▶ check_server ─▶ …         a request ─▶ admit ─▶ its seed, or a random one ─▶ workers
"""

from __future__ import annotations

import os
import secrets
from importlib.metadata import entry_points
from typing import Any

from tlt.base.types import UserError
from tlt.engine.vllm.inside.law import RowLaw
from tlt.engine.vllm.inside.release import check_installed

CONFIG_KEY = "tlt"
"""The law's key in vLLM's `additional_config`.

    {"tau": the drafter's temperature, "captures": whether features are captured}
"""

TUNED = "tlt.engine.vllm.inside.tuned.TunedScheduler"
"""The scheduler with a server's tuner, for `--scheduler-cls`."""

SEED_BITS = 62
"""Bits of a drawn seed. vLLM adds 1, 2, … to it for `n` > 1, in 64 bits."""


def law_config(config: Any) -> dict[str, Any] | None:
    """None: vLLM samples by itself. `additional_config` may be a platform's own object; stand-ins in
    vLLM's tests have none."""
    given = getattr(config, "additional_config", None)
    return given.get(CONFIG_KEY) if isinstance(given, dict) else None


def check_server(config: Any) -> None:
    """Raises UserError where tokens would not be the law's, or the tuner could not work."""
    if config.scheduler_config.scheduler_cls == TUNED:
        _check_tuned(config)
    given = law_config(config)
    if given is None:
        return
    if not isinstance(given, dict) or given.keys() - {"tau", "captures"}:
        takes = "it takes tau and captures, and {} for the defaults"
        raise UserError(f"additional_config: {CONFIG_KEY} is {given!r}; {takes}")
    if not isinstance(tau := given.get("tau", 1.0), int | float) or tau <= 0:
        raise UserError(f"additional_config: {CONFIG_KEY}.tau is {tau!r}; it must be above 0")
    check_installed()
    is_v2, model, drafts = config.use_v2_model_runner, config.model_config, config.speculative_config
    is_ours = "captures" in given  # tlt.engine.vllm.engine reads the law's scores as log-probabilities
    has_own_processors = model.logits_processors or len(entry_points(group="vllm.logits_processors"))
    refused = (
        (
            not is_v2 and config.scheduler_config.async_scheduling,
            "--async-scheduling: the law does not know positions ahead in vLLM's first model runner; add "
            "--no-async-scheduling",
        ),
        (
            not is_ours
            and model.logprobs_mode in ("processed_logits", "processed_logprobs" if is_v2 else "raw_logits"),
            f"--logprobs-mode: {model.logprobs_mode} is not what the law would give; leave it out",
        ),
        (
            drafts is not None and drafts.rejection_sample_method == "synthetic",
            "--speculative-config: rejection_sample_method 'synthetic' accepts drafts by chance; leave it "
            "out",
        ),
        (
            not is_v2 and has_own_processors,
            "--logits-processors: not all of them come before the law in vLLM's first model runner; leave "
            "them out",
        ),
        (model.return_sampling_mask, "--return-sampling-mask: the law keeps one token a row; leave it out"),
        (
            model.is_diffusion,
            f"model: {model.model} is a diffusion model, which the law does not know; leave {CONFIG_KEY} out",
        ),
        (
            config.watermark_config is not None,
            "--watermark-config: the law leaves no choice to mark; leave one of them out",
        ),
        (
            os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"),
            "VLLM_USE_RUST_FRONTEND: loads no plug-ins of Python's, so requests would have no seeds; unset "
            "it",
        ),
    )
    for is_refused, sentence in refused:
        if is_refused:
            raise UserError(sentence)


def _check_tuned(config: Any) -> None:
    drafts = config.speculative_config
    if drafts is None or drafts.num_speculative_tokens_per_batch_size is None:
        raise UserError(
            "--scheduler-cls: the tuner sets the lengths that num_speculative_tokens_per_batch_size of "
            "--speculative-config names, and there are none (vLLM drops them with data parallelism); "
            "leave the tuner out"
        )
    if config.scheduler_config.async_scheduling or config.parallel_config.pipeline_parallel_size > 1:
        raise UserError(
            "--scheduler-cls: the tuner learns from one step before it chooses for the next; add "
            "--no-async-scheduling, and leave --pipeline-parallel-size out"
        )


def admit(config: Any, params: Any) -> None:
    """Raises UserError for SamplingParams that the law cannot serve. Draws a missing seed: all ranks need
    the same, and a preempted request keeps it."""
    if params.logprob_token_ids is not None and not config.use_v2_model_runner:
        raise UserError("logprob_token_ids: is not there under the law; ask for logprobs")
    law = RowLaw.of(params)
    params.top_k = law.params.top_k  # 64 bits hold it
    if params.seed is None:
        params.seed = secrets.randbits(SEED_BITS)
    elif params.seed + params.n > 2**63:
        raise UserError(f"seed: {params.seed} leaves no seeds for {params.n} responses; give a smaller one")

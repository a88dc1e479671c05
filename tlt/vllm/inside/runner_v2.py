"""The law in vLLM's second model runner, the one of GPUs: a logits processor, by vLLM's public interface.

    logits ─▶ vLLM's own processors ─▶ LawProcessor: only the law's token is left in a row ─▶ vLLM samples, or verifies drafts

Whatever vLLM does with such a row (argmax, sampling at any temperature, accepting a draft), the result is
that one token. The number that is left is its log-probability, which `logprobs_mode="processed_logits"`
hands on. Knows no engine of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from tlt.vllm.inside.law import DEFAULT_TAU, LawTable, RowLaw


class LawProcessor(LogitsProcessor):
    """Leaves the law's token alone in every row."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self.table = LawTable(
            req_states.max_num_reqs, req_states.vocab_size, torch.device(req_states.device), DEFAULT_TAU
        )

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self.table.put(req_idx, RowLaw.of(sampling_params))
        return True

    def apply_staged_writes(self) -> None:
        self.table.flush()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        slots_R, positions_R = ctx.expanded_idx_mapping.long(), ctx.pos.long() + 1
        tokens_R, logprobs_R = self.table.draw(logits, slots_R, positions_R)
        logits.fill_(-torch.inf)
        return logits.scatter_(1, tokens_R[:, None], logprobs_R[:, None].to(logits.dtype))


def processor_of(runner: Any) -> LawProcessor:
    """Returns the processor that a runner has loaded."""
    (found,) = (
        processor for processor in runner.sampler.logits_processors if isinstance(processor, LawProcessor)
    )
    return found


def install(runner: Any, tau: float) -> LawTable:
    """Lets the runner's drafter, if it has a learned one, guess with the target's noise."""
    table = processor_of(runner).table
    table.tau = tau
    speculator = runner.speculator
    if speculator is not None and callable(getattr(speculator, "sample_draft", None)):
        _couple(speculator, table)
    return table


def _couple(speculator: Any, table: LawTable) -> None:
    """Replaces the speculator's choice of tokens. A draft follows the position whose output it is drawn
    from."""

    def sample_draft(
        hidden_states: Tensor,
        sample_src_positions: Tensor,
        idx_mapping: Tensor,
        *_: Any,
        spec_step_idx: int = 0,
        **__: Any,
    ) -> Tensor:
        logits_BV = speculator.compute_draft_logits(hidden_states, spec_step_idx).float()
        return table.rank(logits_BV, idx_mapping.long().clamp_min(0), sample_src_positions.long() + 1)

    speculator.sample_draft = sample_draft

"""The law in vLLM's second model runner (GPUs): a logits processor, by vLLM's public interface.

    logits ─▶ vLLM's processors ─▶ LawProcessor masks all but the law's token ─▶ vLLM samples or verifies

Argmax, sampling at any temperature and accepting a draft all give this one token. The row's only finite
value is the token's log-probability, which `logprobs_mode="processed_logits"` returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from tlt.engine.vllm.inside.law import DEFAULT_TAU, LawTable, RowLaw


class LawProcessor(LogitsProcessor):
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


def install_v2(runner: Any, tau: float) -> LawTable:
    (table,) = (one.table for one in runner.sampler.logits_processors if isinstance(one, LawProcessor))
    table.tau = tau
    speculator = runner.speculator
    if speculator is not None and callable(getattr(speculator, "sample_draft", None)):
        _couple(speculator, table)
    return table


def _couple(speculator: Any, table: LawTable) -> None:
    """A draft's position is one after its source position."""

    def sample_draft(hidden_states: Tensor, sample_src_positions: Tensor, idx_mapping: Tensor, *_: Any,
                     spec_step_idx: int = 0, **__: Any) -> Tensor:  # fmt: skip
        logits_BV = speculator.compute_draft_logits(hidden_states, spec_step_idx).float()
        return table.rank(logits_BV, idx_mapping.long().clamp_min(0), sample_src_positions.long() + 1)

    speculator.sample_draft = sample_draft

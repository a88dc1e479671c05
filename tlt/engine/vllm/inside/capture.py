"""Captures the target's hidden states in vLLM's first model runner, as features for the drafter's training.

    a step's hidden states, rows of all requests ─▶ scattered into [slot, position] ─▶ read at its end

Rows of rejected drafts lie behind the kept tokens; the next step overwrites them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlt.engine.vllm.inside.runner_v1 import Batch


class FeatureCapture:
    def __init__(self, runner: Any, batch: Batch) -> None:
        self.runner, self.batch = runner, batch
        self.features_SLF: Tensor | None = None
        self.known_S = torch.zeros(len(batch.table.laws), dtype=torch.int64, device=batch.table.device)
        """Captured from position 0 on, by slot; -1: some are missing."""
        batch.table.on_enter.append(self.forget)
        self._propose = runner.propose_draft_token_ids
        runner.propose_draft_token_ids = self.propose

    def propose(self, scheduler_output: Any, sampled_token_ids: Any, sampling_metadata: Any,
                hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        aux_hidden_states = kwargs.get("aux_hidden_states", args[1] if len(args) > 1 else None) or ()
        num_rows = scheduler_output.total_num_scheduled_tokens
        self._write(scheduler_output, [part[:num_rows] for part in (*aux_hidden_states, hidden_states)])
        return self._propose(
            scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, *args, **kwargs
        )

    def _write(self, scheduler_output: Any, parts: list[Tensor]) -> None:
        features_NF = torch.cat(parts, dim=-1)
        request_ids, scheduled = self.runner.input_batch.req_ids, scheduler_output.num_scheduled_tokens
        counts_B = torch.tensor([scheduled[name] for name in request_ids], device=features_NF.device)
        slots_B, positions_N = self.batch.slots_B, self.runner.positions[: len(features_NF)].to(torch.int64)
        firsts_B = positions_N[counts_B.cumsum(0) - counts_B]
        kept = self._with_room(int((firsts_B + counts_B).max()), features_NF)
        kept[slots_B.repeat_interleave(counts_B), positions_N] = features_NF
        is_next_B = (firsts_B <= self.known_S[slots_B]) & (firsts_B > 0) | (firsts_B == 0)
        self.known_S[slots_B] = torch.where(is_next_B, firsts_B + counts_B, -1)

    def _with_room(self, length: int, features_NF: Tensor) -> Tensor:
        kept, num_slots = self.features_SLF, len(self.known_S)
        if kept is None or kept.shape[1] < length:
            most = self.runner.max_model_len
            grown = features_NF.new_zeros(num_slots, min(max(2 * length, 256), most), features_NF.shape[-1])
            if kept is not None:
                grown[:, : kept.shape[1]] = kept
            self.features_SLF = kept = grown
        return kept

    def forget(self, slot: int) -> None:
        self.known_S[slot] = 0

    def read(self, slot: int, num_positions: int) -> Tensor | None:
        """[num_positions, F]; None: some were not computed here, as in vLLM's prefix cache."""
        if self.features_SLF is None or int(self.known_S[slot]) < num_positions:
            return None
        return self.features_SLF[slot, :num_positions].clone()

    def release(self) -> None:
        self.features_SLF = None
        self.known_S.fill_(-1)

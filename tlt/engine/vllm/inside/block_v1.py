"""A DFlash drafter in vLLM's first model runner: drafts blocks, ranked with the target's noise.

    no drafts wanted    hidden states ─▶ the context's keys and values, and nothing else
    K wanted            … ─▶ a pass over a block of K + 1 slots, as in our own engine ─▶ ranked

Where the window has no room for the block, it is shorter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlt.engine.vllm.inside.runner_v1 import Batch


class BlockDrafter:
    def __init__(self, runner: Any, batch: Batch) -> None:
        self.drafter, self.batch, self.window = runner.drafter, batch, runner.max_model_len
        self._propose = self.drafter.propose
        self.drafter.propose, self.drafter._sample_draft_tokens = self.propose, self.choose

    def propose(
        self, num_speculative_tokens: int, target_token_ids: Tensor, target_positions: Tensor,
        target_hidden_states: Tensor, next_token_ids: Tensor, token_indices_to_sample: Tensor | None,
        common_attn_metadata: Any, sampling_metadata: Any, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Returns drafts [B, num_speculative_tokens], zeros behind a shorter block."""
        room = self.window - common_attn_metadata.max_seq_len - 1
        length = min(num_speculative_tokens, room)
        drafts = next_token_ids.new_zeros(len(next_token_ids), num_speculative_tokens, dtype=torch.int64)
        if length <= 0:
            self._read(target_hidden_states, target_positions, common_attn_metadata.slot_mapping)
            return drafts
        drafts[:, :length] = self._propose(
            length,
            target_token_ids,
            target_positions,
            target_hidden_states,
            next_token_ids,
            token_indices_to_sample,
            common_attn_metadata,
            sampling_metadata,
            **options,
        )
        return drafts

    @torch.inference_mode()
    def _read(self, hidden_NF: Tensor, positions_N: Tensor, slots_N: Tensor) -> None:
        model = self.drafter.model
        model.precompute_and_store_context_kv(
            model.combine_hidden_states(hidden_NF), positions_N, slots_N[: len(positions_N)]
        )

    def choose(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, None]:
        slots_B, length = self.batch.slots_B, self.drafter.num_speculative_tokens
        positions_BK = self.batch.next_B[:, None] + torch.arange(length, device=slots_B.device)
        logits_RV = self.drafter.model.compute_logits(hidden_states)
        return self.batch.table.rank(
            logits_RV, slots_B.repeat_interleave(length), positions_BK.flatten()
        ), None

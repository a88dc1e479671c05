"""A learned drafter that runs only when it drafts, in vLLM's first model runner."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from tlt.engine.vllm.inside.runner_v1 import Batch
from tlt.engine.vllm.inside.unread import Rows, Unread, UnreadPositions, features, why_awake


def why_awake_v1(runner: Any) -> str | None:
    # a block's positions are its own input, beside the target's
    is_longer = runner.drafter.needs_extra_input_slots and runner.speculative_config.method != "dflash"
    own = {
        "it reads more positions than the target": is_longer,
        "it reads images, too": runner.drafter.supports_mm_inputs,
    }
    return why_awake(runner.vllm_config, own)


class DrafterV1:
    def __init__(self, runner: Any, batch: Batch) -> None:
        self.runner, self.drafter, self.batch = runner, runner.drafter, batch
        num_slots = len(batch.table.laws)
        self.unread = UnreadPositions(num_slots, runner.max_model_len, runner.drafter.max_num_tokens)
        batch.table.on_enter.append(self.unread.forget)
        self._propose = runner.propose_draft_token_ids
        runner.propose_draft_token_ids = self.propose

    def propose(
        self, scheduler_output: Any, sampled_token_ids: Any, sampling_metadata: Any, hidden_states: Tensor,
        sample_hidden_states: Tensor, aux_hidden_states: list[Tensor] | None, *metadata: Any,
    ) -> Any:  # fmt: skip
        """vLLM's drafts; none, without a drafter pass, where none are wanted.

        metadata: of the verification, the attention and the blocks.
        """
        rows = self._rows(scheduler_output)
        read = partial(self._pass, sampling_metadata, metadata[1])
        runs = bool(scheduler_output.num_spec_tokens_to_schedule)
        if runs:
            self.unread.read(rows, np.arange(len(rows.slots_B)), read)
        else:
            hidden_NF = features(hidden_states, aux_hidden_states)
            positions_N = self.runner.positions[: len(hidden_NF)].long()
            runs = self.unread.must_run(rows, hidden_NF)
            self.unread.store(rows, hidden_NF, positions_N, self.batch.slots_B, read, runs)
        if not runs:
            return torch.empty(len(rows.slots_B), 0, dtype=torch.int64, device=hidden_states.device)
        return self._propose(
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            *metadata,
        )

    def _rows(self, scheduler_output: Any) -> Rows:
        batch = self.runner.input_batch
        names, slots_B = batch.req_ids, self.batch.slots_B.cpu().numpy()
        counts, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        counts_B = np.array([counts[name] for name in names])
        drafted_B = np.array([len(drafts.get(name, ())) for name in names])
        starts_B = batch.num_computed_tokens_cpu[: len(names)].astype(np.int64)
        return Rows(slots_B, starts_B, counts_B, counts_B > 1 + drafted_B)

    def _pass(self, sampling_metadata: Any, attention: Any, unread: Unread) -> None:
        device, tokens_BT = self.runner.device, self.runner.input_batch.token_ids_cpu
        positions_N = unread.each(unread.ends_B) + unread.behind_N
        rows_N = unread.each(unread.rows_B)

        def on_device(array: np.ndarray[Any, Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(array).to(device, dtype)

        positions, ends = on_device(positions_N), torch.from_numpy(unread.ends_B).int()
        borders, block_size = torch.from_numpy(unread.borders).int(), self.drafter.block_size
        blocks_N = attention.block_table_tensor[on_device(rows_N), positions // block_size].long()
        self.drafter.propose(
            num_speculative_tokens=0,
            target_token_ids=on_device(tokens_BT[rows_N, positions_N], torch.int32),
            target_positions=positions,
            target_hidden_states=self.unread.take(on_device(unread.each(unread.slots_B)), positions),
            next_token_ids=on_device(tokens_BT[unread.rows_B, unread.ends_B], torch.int32),
            token_indices_to_sample=None,
            common_attn_metadata=CommonAttentionMetadata(
                query_start_loc=borders.to(device),
                query_start_loc_cpu=borders,
                seq_lens=ends.to(device),
                seq_lens_cpu_upper_bound=ends,
                num_reqs=len(ends),
                num_actual_tokens=int(borders[-1]),
                max_query_len=int(unread.counts_B.max()),
                max_seq_len=int(ends.max()),
                block_table_tensor=attention.block_table_tensor[on_device(unread.rows_B)],
                slot_mapping=blocks_N * block_size + positions % block_size,
            ),
            sampling_metadata=sampling_metadata,
        )

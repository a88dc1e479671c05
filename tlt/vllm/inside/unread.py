"""A learned drafter that runs only when it drafts, in vLLM's first model runner.

    no drafts     hidden states ─▶ kept, by slot and position                 the drafter does not run
    drafts again  kept ─▶ a pass of the drafter over all that it has not read ─▶ vLLM's own proposal

An EAGLE drafter has keys and values of its own. vLLM keeps them complete by running it in every step, with or
without drafts. Prompts it reads here as they come, too: their hidden states are many, and requests share
their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from tlt.vllm.inside.runner_v1 import Batch

KEPT_BYTES = 1 << 28
"""Memory for the hidden states of unread positions. A request that has filled its share is read at once."""


def is_possible(runner: Any) -> bool:
    """Returns whether the runner's drafter may miss steps: EAGLE's, over text, whose keys and values nobody
    else reads and whose passes no other rank waits for."""
    config, drafts = runner.vllm_config, runner.speculative_config
    return (
        drafts is not None
        and drafts.method in ("eagle", "eagle3")
        and not (runner.drafter.supports_mm_inputs or runner.drafter.needs_extra_input_slots)
        and config.parallel_config.data_parallel_size == 1
        and config.kv_transfer_config is None
    )


@dataclass(frozen=True)
class Row:
    """A request of the batch in this step: the target computes `count` positions from `start` on."""

    index: int
    slot: int
    start: int
    count: int
    num_drafted: int

    @property
    def end(self) -> int:
        """The position after this step's last one."""
        return self.start + self.count


class UnreadPositions:
    """Wraps a runner's `propose_draft_token_ids`, which receives the hidden states of every step."""

    def __init__(self, runner: Any, batch: Batch) -> None:
        self.runner, self.drafter, self.batch = runner, runner.drafter, batch
        self.first_of: dict[int, int] = {}
        """First unread position, by slot. The drafter has read all of a slot that is not here."""
        self.kept_SRF: Tensor | None = None
        """Hidden states: position p of a slot is in row p modulo R."""
        self._propose = runner.propose_draft_token_ids
        batch.slots.on_enter.append(lambda slot: self.first_of.pop(slot, None))
        runner.propose_draft_token_ids = self.propose

    def propose(
        self, scheduler_output: Any, sampled_token_ids: Any, sampling_metadata: Any, hidden_states: Tensor,
        sample_hidden_states: Tensor, aux_hidden_states: list[Tensor] | None, *metadata: Any,
    ) -> Any:  # fmt: skip
        """Returns vLLM's drafts: none, and the drafter has not run, where none are wanted.

        metadata: vLLM's of the verification, of the attention, and of the blocks.
        """
        rows, attention = self._rows(scheduler_output), metadata[1]
        runs = bool(scheduler_output.num_spec_tokens_to_schedule)
        if runs:
            self._read(rows, sampling_metadata, attention)
        else:
            hidden_NF = hidden_states if aux_hidden_states is None else torch.cat(aux_hidden_states, dim=-1)
            hidden_NF = hidden_NF[: sum(row.count for row in rows)]  # vLLM pads its batches
            runs = self._keep(rows, hidden_NF, sampling_metadata, attention)
        if not runs:
            return torch.empty(len(rows), 0, dtype=torch.int64, device=hidden_states.device)
        return self._propose(
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            *metadata,
        )

    def _rows(self, scheduler_output: Any) -> list[Row]:
        batch = self.runner.input_batch
        names, starts = batch.req_ids, batch.num_computed_tokens_cpu[: len(batch.req_ids)].tolist()
        counts, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        slots = self.batch.slots_B.tolist()
        return [
            Row(index, slot, start, counts[name], len(drafts.get(name, ())))
            for index, (name, slot, start) in enumerate(zip(names, slots, starts, strict=True))
        ]

    def _keep(self, rows: list[Row], hidden_NF: Tensor, sampling_metadata: Any, attention: Any) -> bool:
        """Keeps this step's hidden states. Returns whether the drafter has to run all the same, over every
        row, because one reads its prompt."""
        kept_SRF = self._kept(hidden_NF)
        room = kept_SRF.shape[1]
        is_prompt = [row.count > 1 + row.num_drafted or row.count > room for row in rows]
        if not any(is_prompt):
            for row in rows:
                self.first_of.setdefault(row.slot, row.start)
        elif not self.first_of:
            return True
        # in a step that reads prompts, the drafter reads also the rows of requests with nothing unread
        full = [row for row in rows if row.end - self.first_of.get(row.slot, row.start) > room]
        self._read(full, sampling_metadata, attention)
        for row in full:
            if not is_prompt[row.index]:
                self.first_of[row.slot] = row.start
        slots_N, positions_N = self.batch.slots_B, self.runner.positions[: len(hidden_NF)].long()
        if len(hidden_NF) > len(rows):
            counts_B = torch.tensor([row.count for row in rows], device=slots_N.device)
            slots_N = slots_N.repeat_interleave(counts_B)
        if any(is_prompt):
            is_unread_S = torch.zeros(len(kept_SRF), dtype=torch.bool, device=slots_N.device)
            is_unread_S[list(self.first_of)] = True
            is_kept_N = is_unread_S[slots_N]
            slots_N, positions_N = slots_N[is_kept_N], positions_N[is_kept_N]
            hidden_NF = hidden_NF[is_kept_N]
        kept_SRF[slots_N, positions_N % room] = hidden_NF
        return any(is_prompt)

    def _kept(self, hidden_NF: Tensor) -> Tensor:
        if self.kept_SRF is None:
            num_slots, width = len(self.batch.table.laws), hidden_NF.shape[1]
            share = KEPT_BYTES // (num_slots * width * hidden_NF.element_size())
            most = min(self.runner.max_model_len, self.drafter.max_num_tokens)
            self.kept_SRF = hidden_NF.new_empty(num_slots, min(max(share, 1), most), width)
        return self.kept_SRF

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, rows: Sequence[Row], sampling_metadata: Any, attention: Any) -> None:
        """Runs the drafter over all that it has not read of these rows, up to this step's positions."""
        group, num_tokens = list[Row](), 0
        for row in rows:
            num = row.start - self.first_of.get(row.slot, row.start)
            if num and num_tokens + num > self.drafter.max_num_tokens:
                self._pass(group, sampling_metadata, attention)
                group, num_tokens = [], 0
            if num:
                group, num_tokens = [*group, row], num_tokens + num
        if group:
            self._pass(group, sampling_metadata, attention)
        for row in rows:
            self.first_of.pop(row.slot, None)

    def _pass(self, group: Sequence[Row], sampling_metadata: Any, attention: Any) -> None:
        """A pass of the drafter, which proposes nothing."""
        assert self.kept_SRF is not None
        device, tokens_BT = self.kept_SRF.device, self.runner.input_batch.token_ids_cpu
        rows_B, slots_B, ends_B = np.array([(row.index, row.slot, row.start) for row in group]).T
        firsts_B = np.array([self.first_of[row.slot] for row in group])
        counts_B = ends_B - firsts_B
        borders = np.concatenate([[0], counts_B.cumsum()])
        positions_N = np.arange(borders[-1]) + np.repeat(firsts_B - borders[:-1], counts_B)
        rows_N, slots_N = np.repeat(rows_B, counts_B), np.repeat(slots_B, counts_B)

        def on_device(array: np.ndarray[Any, Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(array).to(device, dtype)

        positions, ends = on_device(positions_N), torch.from_numpy(ends_B).int()
        borders_cpu, block_size = torch.from_numpy(borders).int(), self.drafter.block_size
        blocks_N = attention.block_table_tensor[on_device(rows_N), positions // block_size].long()
        self.drafter.propose(
            num_speculative_tokens=0,
            target_token_ids=on_device(tokens_BT[rows_N, positions_N], torch.int32),
            target_positions=positions,
            target_hidden_states=self.kept_SRF[slots_N, positions_N % self.kept_SRF.shape[1]],
            next_token_ids=on_device(tokens_BT[rows_B, ends_B], torch.int32),
            token_indices_to_sample=None,
            common_attn_metadata=CommonAttentionMetadata(
                query_start_loc=borders_cpu.to(device),
                query_start_loc_cpu=borders_cpu,
                seq_lens=ends.to(device),
                seq_lens_cpu_upper_bound=ends,
                num_reqs=len(group),
                num_actual_tokens=int(borders[-1]),
                max_query_len=int(counts_B.max()),
                max_seq_len=int(ends_B.max()),
                block_table_tensor=attention.block_table_tensor[on_device(rows_B)],
                slot_mapping=blocks_N * block_size + positions % block_size,
            ),
            sampling_metadata=sampling_metadata,
        )

"""A learned drafter that runs only when it drafts, in vLLM's second model runner (GPUs).

    propose, no drafts wanted     hidden states ─▶ kept            graphs, sampler and target: as they are
    propose, drafts again         kept ─▶ an eager pass of the drafter ─▶ vLLM's own proposal

The host never waits for the device. Under asynchronous scheduling it knows no sequence's length: positions
are counted from the step's first position, which the device knows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from tlt.base.uploads import upload
from tlt.engine.vllm.inside.law import LawTable
from tlt.engine.vllm.inside.unread import Rows, Unread, UnreadPositions, features, why_awake


def why_awake_v2(runner: Any) -> str | None:
    config, speculator = runner.vllm_config.parallel_config, runner.speculator
    own = {
        "it drafts blocks": speculator.method == "dflash",
        "it reads images, too": speculator.supports_mm_inputs,
        "adaptive verification chooses drafts on the device": speculator.enable_adaptive_verification,
        "other ranks wait for its passes": config.pipeline_parallel_size > 1 or config.enable_eplb,
        "ranks share a sequence": config.decode_context_parallel_size > 1
        or config.prefill_context_parallel_size > 1,
    }
    return why_awake(runner.vllm_config, own)


class DrafterV2:
    def __init__(self, runner: Any, table: LawTable) -> None:
        self.runner, self.speculator = runner, runner.speculator
        num_slots = runner.max_num_reqs
        self.unread = UnreadPositions(num_slots, runner.max_model_len, self.speculator.max_num_tokens)
        self.seen_S = np.zeros(num_slots, dtype=np.int64)
        """Positions that have passed by, by slot. Differences alone matter."""
        table.on_enter.append(self.unread.forget)
        self._propose = self.speculator.propose
        self.speculator.propose = self.propose

    def propose(
        self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None, *sampled: Any, num_speculative_tokens: int | None = None,
        dummy_run: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        """vLLM's drafts; -1, without a drafter pass, where none are wanted."""
        if options.get("is_profile"):  # vLLM measures what memory is left for its cache
            self.unread.make_room(features(last_hidden_states, aux_hidden_states))
        states = last_hidden_states, aux_hidden_states
        if not dummy_run and not self._runs(input_batch, states, num_speculative_tokens):
            drafts: Tensor = self.speculator.draft_tokens[: input_batch.num_reqs]
            return drafts.fill_(-1)
        return self._propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            *sampled,
            num_speculative_tokens=num_speculative_tokens,
            dummy_run=dummy_run,
            **options,
        )

    def _runs(
        self, input_batch: Any, states: tuple[Tensor, list[Tensor] | None], num_to_draft: int | None
    ) -> bool:
        """Whether vLLM's own proposal follows. Reads skipped hidden states, or stores this step's."""
        rows, read = self._rows(input_batch), partial(self._pass, input_batch)
        if num_to_draft != 0:
            self.unread.read(rows, np.arange(input_batch.num_reqs), read)
            return True
        positions_N, slots_B = input_batch.positions, input_batch.idx_mapping
        hidden_NF = features(*states)
        runs = self.unread.must_run(rows, hidden_NF)
        self.unread.store(rows, hidden_NF, positions_N, slots_B, read, runs)
        return runs

    def _rows(self, input_batch: Any) -> Rows:
        """Only the device knows how many drafts were rejected: such rows are left to vLLM's own pass."""
        slots_B, counts_B = input_batch.idx_mapping_np, input_batch.num_scheduled_tokens
        starts_B = self.seen_S[slots_B]
        self.seen_S[slots_B] += counts_B
        return Rows(slots_B, starts_B, counts_B, (counts_B > 1) | input_batch.is_prefilling_np)

    def _pass(self, input_batch: Any, unread: Unread) -> None:
        speculator, states = self.speculator, self.runner.req_states
        tables, buffers, borders = speculator.block_tables, speculator.input_buffers, unread.borders
        num_rows, num_tokens = len(unread.rows_B), int(borders[-1])
        device = buffers.positions.device
        at_B, rows_B = upload(
            [input_batch.query_start_loc_np[unread.rows_B].tolist(), unread.rows_B.tolist()], device
        )
        ends_B, slots_B = input_batch.positions[at_B], input_batch.idx_mapping[rows_B]
        of_N, behind_N = upload([unread.each(np.arange(num_rows)).tolist(), unread.behind_N.tolist()], device)
        slots_N, positions_N = slots_B[of_N], ends_B[of_N] + behind_N

        buffers.query_start_loc[: num_rows + 1] = upload(borders.tolist(), device, torch.int32)
        buffers.seq_lens[:num_rows] = ends_B
        buffers.positions[:num_tokens] = positions_N
        buffers.input_ids[:num_tokens] = states.all_token_ids.gpu[slots_N, positions_N + 1]
        hidden_NF = self.unread.take(slots_N, positions_N)
        if speculator.method == "eagle3":
            hidden_NF = speculator.model.combine_hidden_states(hidden_NF)
        speculator.hidden_states[:num_tokens] = hidden_NF

        tables.gather_block_tables(slots_B, num_reqs_padded=num_rows)
        slot_mappings = tables.compute_slot_mappings(
            slots_B, buffers.query_start_loc[: num_rows + 1], buffers.positions, num_tokens
        )
        ends_at_most = torch.from_numpy(input_batch.num_computed_tokens_np[unread.rows_B])
        speculator.draft_max_seq_len = int(ends_at_most.max())
        attention = speculator._build_attn_metadata(
            num_reqs=num_rows,
            batch_desc=BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_rows),
            query_start_loc_np=borders.astype(np.int32),
            seq_lens_cpu_upper_bound=ends_at_most,
            step=0,
        )
        by_layer = build_slot_mappings_by_layer(slot_mappings, speculator.kv_cache_config)
        speculator._run_model(num_tokens, attention, by_layer, num_tokens_across_dp=None)
        self.runner.prepare_attn(input_batch)  # vLLM's own pass reads the same tables

"""The law in vLLM's first model runner (CPU builds): our samplers replace vLLM's.

logits ─▶ vLLM's processors (penalties, grammar, …) ─▶ LawSampler: a row a request ──────────────┐
                                                    └▶ LawRejectionSampler: a row for each draft ┴▶ tokens
hidden states ─▶ drafter ─▶ ranked with the target's noise ─▶ drafts
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from tlt.engine.vllm.inside.law import EXTRA, LawTable, Slots


class Batch:
    """Maps the runner's rows to slots."""

    def __init__(self, runner: Any, table: LawTable) -> None:
        self.runner, self.table, self.slots = runner, table, Slots(table)
        self._request_ids: list[str] = []
        self._slots_B = torch.zeros(0, dtype=torch.int64)
        self.next_B = self._slots_B
        """Position of the first drafted token."""
        self.has_ranks = False
        """A request may read its tokens' ranks; our engine's do not."""

    @property
    def is_empty(self) -> bool:
        return not self.runner.input_batch.req_ids

    @property
    def slots_B(self) -> Tensor:
        request_ids = self.runner.input_batch.req_ids
        # the law needs no generators of vLLM, and on a CPU vLLM fails to reset one for an unfinished prompt
        self.runner.input_batch.generators.clear()
        if request_ids != self._request_ids:
            self._request_ids = list(request_ids)
            asked = {name: self.runner.requests[name].sampling_params for name in request_ids}
            self.slots.enter(request_ids, asked.__getitem__)
            self.has_ranks = any(EXTRA not in (params.extra_args or {}) for params in asked.values())
            self._slots_B = self.slots.of(self._request_ids)
        return self._slots_B

    @property
    def starts_B(self) -> Tensor:
        """Position behind each request's known tokens."""
        batch = self.runner.input_batch
        starts_B = torch.from_numpy(batch.num_tokens_no_spec[: len(batch.req_ids)].copy())
        return starts_B.to(self.table.device, torch.int64)


class LawSampler(Sampler):
    """vLLM's own sampler handles the warm-up, whose rows have no request."""

    def __init__(self, batch: Batch, replaced: Sampler) -> None:
        super().__init__(replaced.logprobs_mode)
        self.batch, self.replaced = batch, replaced

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, predict_bonus_token: bool = False, **_: Any
    ) -> SamplerOutput:
        if self.batch.is_empty:
            return self.replaced(logits=logits, sampling_metadata=sampling_metadata)
        logits = logits.to(torch.float32)
        logits = self.apply_logits_processors(logits, sampling_metadata, predict_bonus_token)
        slots_B, starts_B = self.batch.slots_B, self.batch.starts_B
        tokens_B, logprobs_B = self.batch.table.draw(logits, slots_B, starts_B)
        self.batch.next_B = starts_B + 1
        scores = self.scores(logits, slots_B, tokens_B, logprobs_B, sampling_metadata.max_num_logprobs)
        return SamplerOutput(tokens_B[:, None].to(torch.int32), scores)

    def scores(
        self, logits_RV: Tensor, slots_R: Tensor, tokens_R: Tensor, logprobs_R: Tensor, num: int | None
    ) -> LogprobsTensors | None:
        """Log-probabilities at the requests' temperatures: of the drawn tokens and of the `num` most
        likely."""
        if num is None:
            return None
        if num:
            scaled_RV = self.batch.table.params.take(slots_R).scale(logits_RV[:, None])[:, 0]
            return self.gather_logprobs(scaled_RV.log_softmax(-1).float(), num, tokens_R)
        ranks_R = torch.zeros_like(tokens_R)
        if self.batch.has_ranks:
            ranks_R = (logits_RV >= logits_RV.gather(1, tokens_R[:, None])).sum(-1)
        return LogprobsTensors(tokens_R[:, None].to(torch.int32), logprobs_R[:, None].float(), ranks_R)


class LawRejectionSampler(RejectionSampler):
    """Draws at every drafted position, and accepts drafts that agree."""

    def __init__(self, batch: Batch, sampler: LawSampler, replaced: RejectionSampler) -> None:
        torch.nn.Module.__init__(self)
        self.batch, self.sampler, self.replaced = batch, sampler, replaced
        self.is_processed_logprobs_mode = replaced.is_processed_logprobs_mode

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        if self.batch.is_empty:
            return self.replaced(metadata, draft_probs, logits, sampling_metadata)
        if not any(metadata.num_draft_tokens):
            return self.sampler(logits, sampling_metadata, predict_bonus_token=True)
        device, width = logits.device, metadata.max_spec_len + 1
        logits = self._processed(metadata, logits.to(torch.float32), sampling_metadata)
        counts_B = torch.tensor(metadata.num_draft_tokens, device=device) + 1  # rows of each request
        num_requests = len(counts_B)
        rows_R = torch.arange(num_requests, device=device).repeat_interleave(counts_B)
        columns_R = torch.arange(len(rows_R), device=device) - (counts_B.cumsum(0) - counts_B)[rows_R]
        slots_R, starts_B = self.batch.slots_B[rows_R], self.batch.starts_B
        tokens_R, logprobs_R = self.batch.table.draw(logits, slots_R, starts_B[rows_R] + columns_R)

        drawn_BW = torch.full((num_requests, width), -1, dtype=torch.int64, device=device)
        drawn_BW[rows_R, columns_R] = tokens_R
        drafted_BW = torch.full_like(drawn_BW, -2)
        at_R = metadata.target_logits_indices
        drafted_BW[rows_R[at_R], columns_R[at_R]] = metadata.draft_token_ids.long()
        num_B = (drawn_BW == drafted_BW).long().cumprod(1).sum(1) + 1
        self.batch.next_B = starts_B + num_B
        is_kept_BW = torch.arange(width, device=device) < num_B[:, None]
        kept_BW = torch.where(is_kept_BW, drawn_BW, PLACEHOLDER_TOKEN_ID).to(torch.int32)
        if sampling_metadata.max_num_logprobs is None:
            return SamplerOutput(kept_BW, None)
        # vLLM drops the rejected rows itself, and expects `width` rows for every request
        flat_N = torch.zeros(num_requests * width, dtype=torch.int64, device=device)
        flat_N[rows_R * width + columns_R] = torch.arange(len(rows_R), device=device)
        found = self.sampler.scores(logits, slots_R, tokens_R, logprobs_R, sampling_metadata.max_num_logprobs)
        assert found is not None
        columns = found.logprob_token_ids, found.logprobs, found.selected_token_ranks
        return SamplerOutput(kept_BW, LogprobsTensors(*(column[flat_N] for column in columns)))

    def _processed(
        self, metadata: SpecDecodeMetadata, logits: Tensor, sampling_metadata: SamplingMetadata
    ) -> Tensor:
        """vLLM's processors, such as penalties, differ for bonus rows and draft rows."""
        at_bonus, at_draft = metadata.bonus_logits_indices, metadata.target_logits_indices
        processed = torch.empty_like(logits)
        processed[at_bonus] = self.sampler.apply_logits_processors(logits[at_bonus], sampling_metadata, True)
        processed[at_draft] = self.apply_logits_processors(logits[at_draft], sampling_metadata, metadata)
        return processed


def install_v1(runner: Any, tau: float) -> Batch:
    vocab_size = runner.model_config.get_vocab_size()
    batch = Batch(runner, LawTable(runner.max_num_reqs, vocab_size, runner.device, tau))
    runner.sampler = LawSampler(batch, runner.sampler)
    if runner.speculative_config is not None:
        runner.rejection_sampler = LawRejectionSampler(batch, runner.sampler, runner.rejection_sampler)
        if runner.speculative_config.use_eagle() and not runner.speculative_config.use_dflash():
            _couple(runner.drafter, batch)
        runner._input_fits_in_drafter = partial(_fits, runner, runner._input_fits_in_drafter)
    return batch


def _fits(runner: Any, fits: Callable[[Any], bool], attention: Any) -> bool:
    """vLLM wants room for a whole draft behind the longest sequence's, else every request verifies zeros.
    These proposers stop at the window, where the scheduler cuts their drafts."""
    is_as_long = runner.effective_drafter_max_model_len == runner.max_model_len
    keeps_within = runner.speculative_config.method in ("eagle", "eagle3", "dflash", "ngram")
    return attention is not None and ((is_as_long and keeps_within) or fits(attention))


def _couple(drafter: Any, batch: Batch) -> None:
    """A proposal calls `choose` for every position from `next_B` on."""
    propose, level = drafter.propose, 0

    def propose_from_the_root(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal level
        level = 0
        return propose(*args, **kwargs)

    def choose(hidden_states: Tensor, sampling_metadata: SamplingMetadata) -> tuple[Tensor, None]:
        nonlocal level
        logits_BV = drafter.model.compute_logits(hidden_states)
        tokens_B = batch.table.rank(logits_BV, batch.slots_B, batch.next_B + level)
        level += 1
        return tokens_B, None

    drafter.propose, drafter._sample_draft_tokens = propose_from_the_root, choose

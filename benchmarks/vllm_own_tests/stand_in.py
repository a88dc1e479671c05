"""Wakes the plug-in in whatever a test of vLLM's builds; runs in vLLM's processes.

Engines take our samplers by themselves. A test of a sampler builds one of vLLM's and gives it logits and
metadata without an engine: there a class of ours takes its place, and each row is a request whose seed is
that of the row's generator, or random.
"""

from __future__ import annotations

import secrets
from inspect import signature
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import distributed
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler as VllmRejectionSampler
from vllm.v1.sample.sampler import Sampler as VllmSampler

from tlt.base.types import UserError
from tlt.engine.vllm.inside.law import DEFAULT_TAU, LawTable
from tlt.engine.vllm.inside.runner_v1 import Batch, LawRejectionSampler, LawSampler
from tlt.engine.vllm.inside.served import SEED_BITS

CERTAIN = 1e6
"""Logit of a token that is certain."""


def name_the_plugin() -> None:
    """Lets every VllmConfig name the plug-in, whoever builds it."""
    finish = VllmConfig.__post_init__

    def with_law(self: Any) -> None:
        self.additional_config = {**(self.additional_config or {}), "tlt": {}}
        finish(self)

    VllmConfig.__post_init__ = with_law


def run_eagerly() -> None:
    """Lets every engine run without compiling its model, which takes longer than most of these tests."""
    finish = EngineArgs.__post_init__

    def eager(self: Any) -> None:
        self.enforce_eager = True
        finish(self)

    EngineArgs.__post_init__ = eager


def clean_up_after_engines_only() -> None:
    """Lets vLLM's clean-up after each test pass where no engine was started: it costs more than most tests."""
    clean_up = distributed.cleanup_dist_env_and_memory

    def clean_up_after_engines(*given: Any, **named: Any) -> None:
        if torch.distributed.is_initialized():
            clean_up(*given, **named)

    distributed.cleanup_dist_env_and_memory = clean_up_after_engines


def stand_in_for_samplers() -> None:
    """Replaces vLLM's samplers for modules that import them from now on: the tests'."""
    sampler.Sampler = SamplerStandIn
    rejection_sampler.RejectionSampler = RejectionStandIn


def batch_of(metadata: SamplingMetadata, logits: Tensor, num_requests: int) -> Batch:
    """Returns a batch whose requests are the metadata's rows."""

    def value(of: Tensor | None, row: int, default: float) -> float:
        return default if of is None or not of.numel() else of[row].item()

    requests = {}
    for row in range(num_requests):
        generator = metadata.generators.get(row)
        temperature = 0.0 if metadata.all_greedy else value(metadata.temperature, row, 0.0)
        seed = secrets.randbits(SEED_BITS) if generator is None else generator.initial_seed()
        top_k, top_p = int(value(metadata.top_k, row, 0)), value(metadata.top_p, row, 1.0)
        asked = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        requests[str(row)] = SimpleNamespace(sampling_params=asked)
    known = [len(tokens) for tokens in metadata.output_token_ids] or [0] * num_requests
    held = SimpleNamespace(req_ids=list(requests), generators={}, num_tokens_no_spec=np.array(known))
    runner = SimpleNamespace(input_batch=held, requests=requests)
    return Batch(runner, LawTable(num_requests, logits.shape[-1], logits.device, DEFAULT_TAU))


class SamplerStandIn(VllmSampler):
    """vLLM's Sampler, whose tokens the law draws."""

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **named: Any) -> Any:
        batch = batch_of(sampling_metadata, logits, len(logits))
        return LawSampler(batch, self)(logits, sampling_metadata, *args, **named)


class _NothingProcessed(LawSampler):
    """The sampler of bonus rows that a test has made up: no penalty applies to them."""

    def apply_logits_processors(self, logits: Tensor, *_: Any) -> Tensor:
        return logits


class RejectionStandIn(VllmRejectionSampler):
    """vLLM's RejectionSampler, whose tokens the law draws.

    vLLM's tests make the bonus tokens up: they become rows of logits in which these tokens are certain.
    """

    def __init__(self, given: Any, spec_config: Any = None, device: Any = None) -> None:
        if spec_config is not None and spec_config.rejection_sample_method == "synthetic":
            raise UserError("rejection_sample_method 'synthetic' accepts drafts by chance; leave it out")
        super().__init__(given, spec_config, device)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Takes what LawRejectionSampler.forward takes; like it, this has no use for the drafts' probabilities."""
        given = signature(LawRejectionSampler.forward).bind(self, *args, **named).arguments
        metadata, logits, sampling_metadata = itemgetter("metadata", "logits", "sampling_metadata")(given)
        counts = metadata.num_draft_tokens
        bonus_B = self.sampler().sampled_token_ids.flatten()
        batch = batch_of(sampling_metadata, logits, len(counts))
        ends_B = torch.tensor(counts).cumsum(0) + torch.arange(len(counts))  # row of each request's bonus
        is_bonus_R = torch.zeros(len(logits) + len(counts), dtype=torch.bool)
        is_bonus_R[ends_B] = True
        rows_RV = logits.new_full((len(is_bonus_R), logits.shape[-1]), -CERTAIN)
        rows_RV[~is_bonus_R] = logits[metadata.target_logits_indices.long()]
        rows_RV[ends_B, bonus_B.long()] = CERTAIN
        metadata.target_logits_indices, metadata.bonus_logits_indices = (~is_bonus_R).nonzero()[:, 0], ends_B
        law = LawRejectionSampler(batch, _NothingProcessed(batch, VllmSampler()), self)
        return law(metadata, None, rows_RV, sampling_metadata)

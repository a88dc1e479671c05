"""A Markov chain to judge: the next token's logits are a row of a table, so no model is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlt.apps.audit.verdict import Auditor
from tlt.base.types import Rollout, SamplingParams

V, STOP = 13, 3
PARAMS = SamplingParams(stop_ids=(STOP,), max_tokens=300)


def make_table(seed: int = 0, scale: float = 4.0) -> Tensor:
    """Logits_VV after each token; the stop token is unlikely, so that responses are long."""
    table_VV = torch.randn(V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    table_VV[:, STOP] = -2.0
    return table_VV


def sample_chain(p_VV: Tensor, num_tokens: int, seed: int, index: int = 0) -> Rollout:
    """A response of exactly `num_tokens` or up to the stop token."""
    generator = torch.Generator().manual_seed(seed)
    cumulative = p_VV.cumsum(-1).tolist()
    tokens = [0]
    for u in torch.rand(num_tokens, generator=generator, dtype=torch.float64).tolist():
        row = cumulative[tokens[-1]]
        tokens.append(next((v for v, c in enumerate(row) if u < c), V - 1))
        if tokens[-1] == STOP:
            break
    return Rollout("p", index, (0,), tuple(tokens[1:]), (), "length", 0)


def judge(auditor: Auditor, table_VV: Tensor, rollout: Rollout) -> None:
    previous = torch.tensor([*rollout.prompt_ids, *rollout.token_ids[:-1]])
    auditor.observe(rollout, [table_VV[previous]])


def run_audit(
    table_VV: Tensor,
    engine_VV: Tensor,
    num_tokens: int,
    seed: int,
    params: SamplingParams = PARAMS,
    **options: Any,
) -> Auditor:
    """Judges responses of an engine that samples from `engine_VV` until `num_tokens` are judged."""
    auditor = Auditor(params, V, 10**6, limit=params.max_tokens, **options)
    while auditor.num_tokens < num_tokens:
        index = seed * 100_003 + len(auditor.lengths)
        judge(auditor, table_VV, sample_chain(engine_VV, params.max_tokens, index))
    return auditor

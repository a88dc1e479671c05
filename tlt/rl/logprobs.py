"""The log-probabilities of responses under a policy, with gradients. Knows no loss.

Axes: N tokens of a flat batch · T response tokens of it · E hidden size · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt.models.attention import PackedCausal
from tlt.models.decoder import Transformer
from tlt.models.lora import BaseOf
from tlt.rl.algorithms import entropy
from tlt.rl.plan import Response

LOGITS_PER_CHUNK = 2**24
"""Elements of logits alive at a time: with a large vocabulary the head runs in chunks, and once more in the backward pass."""


def response_logprobs(model: Transformer | BaseOf, batch: Sequence[Response], temperature: float) -> tuple[Tensor, Tensor]:
    """Returns (logprobs_T, entropy_T) of the response tokens, sequence after sequence. Gradients flow through the logprobs; the
    entropy is a metric. bf16 logits are widened to float32 first."""
    device = model.head_weight.device
    attend = PackedCausal(model.config, [r.length for r in batch])
    tokens: list[int] = []
    targets: list[int] = []
    readers: list[int] = []
    start = 0
    for r in batch:
        tokens += [*r.rollout.prompt_ids, *r.rollout.token_ids[:-1]]
        targets += r.rollout.token_ids
        readers += range(start + r.length - r.num_tokens, start + r.length)
        start += r.length
    targets_T = torch.tensor(targets, device=device)

    def head(features_E: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        logits_V = model.logits(features_E)
        logits_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32)) / temperature
        logprobs_V = logits_V.log_softmax(-1)
        return logprobs_V.gather(-1, chosen[:, None])[:, 0].clone(), entropy(logprobs_V.detach())  # FSDP wants no views

    def read(features_NE: Tensor) -> tuple[Tensor, Tensor]:
        features_TE = features_NE[torch.tensor(readers, device=device)]
        rows = max(LOGITS_PER_CHUNK // model.config.vocab_size, 1)
        if len(targets) <= rows:
            return head(features_TE, targets_T)
        chunks = [
            checkpoint(head, features, chosen, use_reentrant=False, preserve_rng_state=False)
            for features, chosen in zip(features_TE.split(rows), targets_T.split(rows), strict=True)
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    result: tuple[Tensor, Tensor] = model(torch.tensor(tokens, device=device), attend.positions(device), attend, read)
    return result

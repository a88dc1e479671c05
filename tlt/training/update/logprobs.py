"""The log-probabilities of responses under a policy, with gradients.

Axes: N tokens of a flat batch · T response tokens of it, of one response after the other · E hidden size ·
      V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt.base.uploads import upload
from tlt.models.attention import SharedPrompts
from tlt.models.decoder import Policy
from tlt.models.lora import BaseOf
from tlt.training.update.algorithms import entropy
from tlt.training.update.plan import Experience, families_of
from tlt.training.update.routes import Routes

LOGITS_PER_CHUNK = 2**24
"""In memory at a time: a larger head runs in chunks, and again in the backward pass."""


def response_logprobs(
    model: Policy | BaseOf, batch: Sequence[Experience], temperature: float, routes: Routes | None = None
) -> tuple[Tensor, Tensor]:
    """(logprobs_T, entropy_T) of the response tokens; the entropy carries no gradient. bf16 logits are
    widened to float32. routes: of a model with experts."""
    device = model.head_weight.device
    families = families_of(batch)
    sizes = [(batch[f[0]].num_prompt, [batch[i].num_own for i in f]) for f in families]
    attend = SharedPrompts(model.config, sizes)
    tokens: list[int] = []
    predictors: dict[int, list[int]] = {}  # response → the positions that predict its tokens
    for family in families:
        tokens += batch[family[0]].rollout.prompt_ids
        end = len(tokens) - 1
        for i in family:
            predictors[i] = [end, *range(len(tokens), len(tokens) + batch[i].num_own)]
            tokens += batch[i].rollout.token_ids[:-1]
    predictors_T = upload([n for i in range(len(batch)) for n in predictors[i]], device)
    targets_T = upload([token for r in batch for token in r.rollout.token_ids], device)

    def head(features_TE: Tensor, chosen_T: Tensor) -> tuple[Tensor, Tensor]:
        logits_TV = model.logits(features_TE)
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        # as in decoder.py
        apply = ChosenLogprobs.apply
        logprobs_T, entropy_T = apply(logits_TV, chosen_T, temperature)  # type: ignore[no-untyped-call]
        return logprobs_T, entropy_T

    def read(features_NE: Tensor) -> tuple[Tensor, Tensor]:
        features_TE = features_NE[predictors_T]
        rows = max(LOGITS_PER_CHUNK // model.config.vocab_size, 1)
        if len(targets_T) <= rows:
            return head(features_TE, targets_T)
        chunks = [
            checkpoint(head, part_TE, chosen_T, use_reentrant=False, preserve_rng_state=False)
            for part_TE, chosen_T in zip(features_TE.split(rows), targets_T.split(rows), strict=True)
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    inputs = upload(tokens, device), attend.positions(device), attend, read
    if routes is None:
        result: tuple[Tensor, Tensor] = model(*inputs)
        return result
    starts = {i: (places[1:] or [places[0] + 1])[0] for i, places in predictors.items()}
    routing = routes.routing(batch, families, starts, len(tokens))
    result = model(*inputs, routing)
    routes.observe(batch, starts, routing)
    return result


class ChosenLogprobs(torch.autograd.Function):
    """(logits_TV, chosen_T, temperature) ─▶ (log-softmax(logits / temperature) at the chosen tokens, entropy
    without gradient). Keeps one matrix for the backward pass and allocates one there; autograd would need
    five."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, chosen_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs_TV = (logits_TV if temperature == 1 else logits_TV / temperature).log_softmax(-1)
        entropy_T = entropy(logprobs_TV)
        ctx.save_for_backward(logprobs_TV, chosen_T)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_TV.gather(-1, chosen_T[:, None])[:, 0].clone(), entropy_T  # FSDP wants no views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """d log p_c / d logit_v = (1[v = c] - p_v) / temperature"""
        logprobs_TV, chosen_T = ctx.saved_tensors
        gradient_T1 = gradients[0][:, None] / ctx.temperature
        gradient_TV = logprobs_TV.exp().mul_(-gradient_T1)
        return gradient_TV.scatter_add_(-1, chosen_T[:, None], gradient_T1), None, None

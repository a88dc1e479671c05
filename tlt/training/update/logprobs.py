"""The log-probabilities of responses under a policy, with gradients.

Axes: N tokens of a flat batch · T response tokens of it, of one response after the other · E hidden size ·
      V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt.base.uploads import upload
from tlt.engine.equal_rows import EqualRows
from tlt.models.attention import SharedPrompts
from tlt.models.decoder import Policy, given
from tlt.models.lora import BaseOf
from tlt.models.routing import Routing
from tlt.training.update.algorithms import entropy
from tlt.training.update.micro_batches import Experience, families_of
from tlt.training.update.routes import Routes

LOGITS_PER_CHUNK = 2**24
"""In memory at a time: a larger head runs in chunks, and again in the backward pass."""


def response_logprobs(
    model: Policy | BaseOf,
    batch: Sequence[Experience],
    temperature: float,
    routes: Routes | None = None,
    rows: EqualRows | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs_T, entropy_T) of the response tokens, at least float32; the entropy carries no gradient.

    routes: of a model with experts.
    rows: whose numbers stand for the model's, which then computes derivatives alone.
    """
    packed = _pack(batch, model.head_weight.device)
    if rows is not None and not torch.is_grad_enabled():
        return _of_rows(rows, batch, packed, routes)
    known = None if rows is None else rows.forward(packed.tokens_N, packed.families)
    attend = SharedPrompts(model.config, packed.families)

    def head(features_TE: Tensor, chosen_T: Tensor) -> tuple[Tensor, Tensor]:
        logits_TV = model.logits(features_TE)
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        known_T = None
        if rows is not None:
            logits_TV = given(logits_TV, rows.logits(features_TE.detach()))
            known_T = rows.logprobs(logits_TV.detach(), chosen_T)
        chosen = logits_TV, chosen_T, temperature, known_T
        found: tuple[Tensor, Tensor] = ChosenLogprobs.apply(*chosen)  # type: ignore[no-untyped-call]
        return found

    def read(features_NE: Tensor) -> tuple[Tensor, Tensor]:
        features_TE = features_NE[packed.predictors_T]
        size = _rows_per_chunk(model.config.vocab_size)
        if len(features_TE) <= size:
            return head(features_TE, packed.targets_T)
        chunks = [
            checkpoint(head, part_TE, chosen_T, use_reentrant=False, preserve_rng_state=False)
            for part_TE, chosen_T in zip(features_TE.split(size), packed.targets_T.split(size), strict=True)
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    arguments = packed.tokens_N, attend.positions(packed.tokens_N.device), attend, read
    inputs = () if known is None else known.inputs
    if routes is None:
        result: tuple[Tensor, Tensor] = model(*arguments, inputs) if inputs else model(*arguments)
        return result
    routing = routes.routing(batch, packed.members, packed.starts, len(packed.tokens_N))
    if known is not None:
        routing = Routing(known.routes.view(-1, *routes.shape))
    result = model(*arguments, inputs, routing)
    routes.observe(batch, packed.starts, routing.found_NRK if known is None else known.routes)
    return result


def logprobs_of_rows(rows: EqualRows, batch: Sequence[Experience]) -> tuple[Tensor, Tensor]:
    """As `response_logprobs`, of a model that is not trained."""
    return _of_rows(rows, batch, _pack(batch, rows.target.device), None)


@torch.no_grad()
def _of_rows(
    rows: EqualRows, batch: Sequence[Experience], packed: _Packed, routes: Routes | None
) -> tuple[Tensor, Tensor]:
    read = rows.forward(packed.tokens_N, packed.families, every_layer=False)
    if routes is not None:
        routes.observe(batch, packed.starts, read.routes)
    (features_NE,) = read.inputs
    features_TE, size = features_NE[packed.predictors_T], _rows_per_chunk(rows.target.config.vocab_size)
    logprobs, entropies = [], []
    for part_TE, chosen_T in zip(features_TE.split(size), packed.targets_T.split(size), strict=True):
        logits_TV = rows.logits(part_TE)
        logprobs.append(rows.logprobs(logits_TV, chosen_T))
        entropies.append(entropy(rows.params.scale(logits_TV[None])[0].log_softmax(-1)))
    return torch.cat(logprobs), torch.cat(entropies)


def _rows_per_chunk(vocab_size: int) -> int:
    return max(LOGITS_PER_CHUNK // vocab_size, 1)


@dataclass(frozen=True)
class _Packed:
    """A micro-batch as one flat batch.

    members: of each family, by index; families: their lengths, see `SharedPrompts`.
    predictors_T: the positions that predict the response tokens `targets_T`.
    starts: place of each response's first token, by index.
    """

    tokens_N: Tensor
    members: list[list[int]]
    families: list[tuple[int, list[int]]]
    predictors_T: Tensor
    targets_T: Tensor
    starts: dict[int, int]


def _pack(batch: Sequence[Experience], device: torch.device) -> _Packed:
    members = families_of(batch)
    tokens: list[int] = []
    predictors: dict[int, list[int]] = {}
    starts: dict[int, int] = {}
    for family in members:
        tokens += batch[family[0]].rollout.prompt_ids
        end = len(tokens) - 1
        for i in family:
            rollout, starts[i] = batch[i].rollout, len(tokens)
            predictors[i] = [starts[i] + place - 1 if place else end for place in rollout.drawn]
            tokens += rollout.token_ids[:-1]
    return _Packed(
        upload(tokens, device),
        members,
        [(batch[family[0]].num_prompt, [batch[i].num_own for i in family]) for family in members],
        upload([n for i in range(len(batch)) for n in predictors[i]], device),
        upload([r.rollout.token_ids[place] for r in batch for place in r.rollout.drawn], device),
        starts,
    )


class ChosenLogprobs(torch.autograd.Function):
    """(logits_TV, chosen_T, temperature, known_T) ─▶ (log-softmax(logits / temperature) at the chosen tokens,
    or what is known of it; entropy without gradient). Keeps and allocates one matrix each; autograd would
    need five."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, chosen_T: Tensor, temperature: float, known_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logprobs_TV = (logits_TV if temperature == 1 else logits_TV / temperature).log_softmax(-1)
        entropy_T = entropy(logprobs_TV)
        ctx.save_for_backward(logprobs_TV, chosen_T)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_T)
        if known_T is not None:
            return known_T.clone(), entropy_T
        return logprobs_TV.gather(-1, chosen_T[:, None])[:, 0].clone(), entropy_T  # FSDP wants no views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """d log p_c / d logit_v = (1[v = c] - p_v) / temperature"""
        logprobs_TV, chosen_T = ctx.saved_tensors
        gradient_T1 = gradients[0][:, None] / ctx.temperature
        gradient_TV = logprobs_TV.exp().mul_(-gradient_T1)
        return gradient_TV.scatter_add_(-1, chosen_T[:, None], gradient_T1), None, None, None

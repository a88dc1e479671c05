"""How good is a drafter?"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.drafter.model import DraftModel, PackedDrafter, align
from tlt.models.attention import PackedCausal
from tlt.models.decoder import PackedTransformer
from tlt.types import Rollout


@dataclass(frozen=True)
class Sample:
    """Some responses that have gone through the target. `is_response_M` marks the R pairs that predict a token of a response
    (models.drafter.align says what a pair is); target_RV is the distribution that token was drawn from."""

    token_ids_N: Tensor
    captured_NF: Tensor
    lengths: tuple[int, ...]
    is_response_M: Tensor
    target_RV: Tensor


@dataclass(frozen=True)
class Tally:
    """What one rank measured, sums over its positions. `distance`: between the engine's and the trainer's copy."""

    num_positions: int = 0
    accepted: float = 0.0
    retrieved: int = 0
    distance: float = 0.0
    checksum: float = 0.0


def judge(acceptance: float, retrieval: float) -> str:
    """Why a drafter with this acceptance must not draft; empty: it may."""
    if not math.isfinite(acceptance):
        return "its outputs are not finite"
    if acceptance < retrieval:
        return f"its acceptance {acceptance:.3f} is below retrieval's {retrieval:.3f}"
    return ""


def draw(rollouts: Sequence[Rollout], max_tokens: int, rng: random.Random) -> dict[int, int]:
    """Index of each chosen response → how many of its tokens count: whole responses until the tokens are used up; what does not
    fit is cut off. Prompts are free: however long they are, something is measured. A prompt of one token has no pair for the
    first response token; it is not chosen."""
    counts: dict[int, int] = {}
    for index in rng.sample(range(len(rollouts)), len(rollouts)):
        count = min(len(rollouts[index].token_ids), max_tokens)
        if count > 0 and len(rollouts[index].prompt_ids) > 1:
            counts[index] = count
            max_tokens -= count
    return counts


def read(
    chosen: Sequence[tuple[Rollout, int]], target: PackedTransformer, capture: tuple[int, ...], temperature: float
) -> Sample:
    """One packed forward of the target over prompts and the response tokens that count, the last of each excepted."""
    rows = [[*rollout.prompt_ids, *rollout.token_ids[: count - 1]] for rollout, count in chosen]
    token_ids_N = torch.tensor([token for row in rows for token in row], device=target.device)
    attend = PackedCausal(target.config, [len(row) for row in rows])
    features_NE, captured_NF = target.forward_capturing(token_ids_N, attend.positions(target.device), attend, capture)
    pairs = align([len(row) for row in rows], target.device)
    first = [len(rollout.prompt_ids) - 2 for rollout, _ in chosen]  # pair t predicts token t + 2
    is_response_M = torch.cat([torch.arange(len(row) - 1) >= start for row, start in zip(rows, first, strict=True)])
    is_response_M = is_response_M.to(target.device)
    target_RV = distribution(target.logits(features_NE[pairs.token_index_M[is_response_M]]), temperature)
    return Sample(token_ids_N, captured_NF, tuple(len(row) for row in rows), is_response_M, target_RV)


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Softmax at the temperature, in float64; at temperature 0 all on the likeliest token. NaN stays NaN."""
    if temperature == 0:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).double() + 0.0 * logits.double()
    return (logits.double() / temperature).softmax(dim=-1)


def engine_logits(drafter: PackedDrafter, target: PackedTransformer, sample: Sample) -> Tensor:
    """[R, draft vocabulary], float64."""
    pairs = align(sample.lengths, target.device)
    embeddings_ME = target.embed(sample.token_ids_N[pairs.token_index_M])
    hidden_ME = drafter.fuse(sample.captured_NF[pairs.feature_index_M])
    attend = PackedCausal(drafter.config.layer, pairs.lengths)
    hidden_ME = drafter.forward(embeddings_ME, hidden_ME, pairs.positions_M, attend)
    return drafter.logits(hidden_ME[sample.is_response_M], target).double()


def trainer_logits(model: DraftModel, target: PackedTransformer, sample: Sample) -> Tensor:
    """The same of the copy that is trained, in its own dtype."""
    pairs, dtype = align(sample.lengths, target.device), next(model.parameters()).dtype
    embeddings_ME = target.embed(sample.token_ids_N[pairs.token_index_M]).to(dtype)
    hidden_ME = model.fuse(sample.captured_NF[pairs.feature_index_M].to(dtype))
    attend = PackedCausal(model.config.layer, pairs.lengths)
    hidden_ME = model(embeddings_ME, hidden_ME, pairs.positions_M, attend)
    head_VE = model.lm_head.weight if model.config.owns_head else model.restrict(target.head_VE.to(dtype))
    return model.logits(hidden_ME[sample.is_response_M], head_VE).double()

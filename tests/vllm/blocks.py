"""What a block drafter drafts at given places of a text, and drafters with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlt.drafter.block import PackedBlock, run_blocks
from tlt.models.attention import PackedCausal
from tlt.models.packed import PackedTransformer


@dataclass(frozen=True)
class _Text:
    token_ids_N: Tensor
    captured_NF: Tensor
    lengths: tuple[int, ...]


@torch.inference_mode()
def blocks_at(
    packed: PackedBlock, target: PackedTransformer, tokens: Sequence[int], found: Sequence[Sequence[Any]]
) -> list[Tensor]:
    """Returns the logits [drafted tokens, V] of the block at each place, over all of the target's tokens."""
    shape, ids_N = packed.config, torch.tensor(tokens)
    attend = PackedCausal(target.config, [len(tokens)])
    _, captured_NF = target.forward_capturing(ids_N, attend.positions(), attend, shape.capture)
    places = sorted({row[0] for row in found})
    text = _Text(ids_N, captured_NF, (len(tokens),))
    hidden_AUE = run_blocks(packed, text, [places], target.embed)
    logits_AKC = packed.logits(hidden_AUE[:, shape.first_slot :], target)
    logits_AKV = logits_AKC.new_full((*logits_AKC.shape[:2], shape.layer.vocab_size), -torch.inf)
    logits_AKV[..., slice(None) if packed.token_ids is None else packed.token_ids] = logits_AKC
    return [logits_AKV[places.index(row[0])] for row in found]


@torch.no_grad()
def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draws weights that matter, norms of their own included."""
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(
            drawn * (1.5 / parameter.shape[-1] ** 0.5) if parameter.ndim == 2 else 1 + 0.3 * drawn
        )

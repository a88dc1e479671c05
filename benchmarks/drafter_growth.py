"""Grows a drafter along with its target (growth.py). It proposes the same tokens, at the cost of the
larger geometry. The number of its layers stays.

    fc             its input is several vectors side by side, e + e → E + E: each grows in place. In EAGLE's
                   family, where its output is the residual stream, it passes the constant of one of them on
    layers         as the target's; what attention reads side by side (eagle3) grows in place, too
    norms          as the target's; that before the head, which eagle lacks, scales the constant, so that it
                   never proposes an unused id
    Markov head    rank r → R, and the vocabulary; further dimensions hold noise
    d2t            unchanged; t2d marks the added ids as not proposed

A captured layer keeps its number, because the target's further layers come after its own. The features are
those behind the last layer, so their number changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.geometry import OPTION, Geometry, check_geometry
from benchmarks.growth import NOISE, Axis, FillNoise, Form, Widening, probe_tokens
from tlt.base.types import UserError
from tlt.drafter.block import BlockModel, run_blocks
from tlt.drafter.eagle import EagleModel
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import BlockShape, DrafterShape, EagleShape, markov_rank
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig
from tlt.models.packed import PackedTransformer

STAY_TRUE = ("preset", "num_tokens", "cpu_seconds", "acceptance")
"""Facts about a drafter's origin that are the grown one's, too."""


def grow_shape(shape: DrafterShape, small: ModelConfig, grown: ModelConfig) -> DrafterShape:
    """Returns the shape of the drafter for the grown target. UserError where a drafter of this shape cannot
    grow."""
    if shape.owns_head or shape.has_bias:
        remedy = "give one that TLT trained, or --drafter.path none"
        raise UserError(f"{OPTION}: a drafter with a head or bias of its own does not grow; {remedy}")
    layer = replace(
        grown,
        architecture=shape.layer.architecture,
        num_layers=shape.layer.num_layers,
        rms_norm_eps=shape.layer.rms_norm_eps * shape.layer.hidden_size / grown.hidden_size,
        rope_theta=shape.layer.rope_theta,
        rope_scaling=shape.layer.rope_scaling,
        tie_embeddings=True,
    )
    check_geometry(shape.layer, Geometry("the geometry", layer), "the drafter")
    wider = replace(
        shape,
        layer=layer,
        capture=tuple(grown.num_layers if i == small.num_layers else i for i in shape.capture),
        draft_vocab_size=shape.draft_vocab_size if shape.is_reduced else grown.vocab_size,
    )
    if not isinstance(wider, BlockShape):
        return wider
    rank = max(wider.markov_rank, markov_rank(grown.hidden_size)) if wider.markov_rank else 0
    return replace(wider, num_target_layers=grown.num_layers, markov_rank=rank)


def grow_drafter(
    drafter: StoredDrafter,
    small: ModelConfig,
    tensors: Mapping[str, Tensor],
    grown: ModelConfig,
    dtype: torch.dtype,
    noise: float = NOISE,
) -> StoredDrafter:
    """Returns the drafter for the grown target. Of the facts about its origin those are kept that stay true.

    small, tensors: the target before it grows.
    """
    shape, wider = drafter.config, grow_shape(drafter.config, small, grown)
    widening = Widening(shape.layer, wider.layer, num_read=2 if shape.method == "eagle3" else 1)
    amount = FillNoise(noise, dtype)
    found = _grow_layers(shape, drafter.tensors, widening, amount)
    for name, form in _forms(shape, wider, widening).items():
        found[name] = amount.grow(form, drafter.tensors[name], f"drafter.{name}")
    constant, added = widening.constant, (0, grown.vocab_size - small.vocab_size)
    if shape.has_norm:
        residual = draft_residual_size(shape, drafter.tensors, small, tensors)
        found["norm.weight"][constant] = widening.constant_gain(tensors, residual)
    if isinstance(shape, EagleShape):
        begin = wider.layer.hidden_size if shape.method == "eagle" else 0  # the feature, or the first layer
        found["fc.weight"][constant] = 0
        found["fc.weight"][constant, begin + constant] = 1
    if shape.is_reduced:
        found |= {"d2t": drafter.tensors["d2t"], "t2d": F.pad(drafter.tensors["t2d"], added)}
    counts_V = None if drafter.counts_V is None else F.pad(drafter.counts_V, added)
    about = {name: drafter.about[name] for name in STAY_TRUE if name in drafter.about}
    return StoredDrafter(wider, found, about, counts_V)


def _grow_layers(
    shape: DrafterShape, tensors: Mapping[str, Tensor], widening: Widening, noise: FillNoise
) -> dict[str, Tensor]:
    numbered = [f"layers.{index}" for index in range(shape.layer.num_layers)]
    found = {}
    for called in [shape.layer_name] if isinstance(shape, EagleShape) else numbered:
        prefix = f"{called}."
        layer = {n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)}
        for name in layer:
            found[prefix + name] = widening.grow(name, layer, noise, f"drafter.{prefix}{name}")
    return found


def _forms(shape: DrafterShape, wider: DrafterShape, widening: Widening) -> dict[str, Form]:
    """Returns the form of every tensor outside the layers that grows, by its name."""
    hidden = widening.hidden
    num_read = shape.fc_size // shape.layer.hidden_size
    forms = {"fc.weight": Form((hidden, Axis.side_by_side(*[hidden] * num_read)))}
    if shape.has_norm:
        forms["norm.weight"] = widening.norm
    if not (isinstance(shape, BlockShape) and isinstance(wider, BlockShape)):
        return forms
    forms["hidden_norm.weight"] = widening.norm
    if shape.markov_rank:
        rank = Axis.first(shape.markov_rank, wider.markov_rank)
        read = Axis.first(shape.layer.vocab_size, wider.layer.vocab_size)
        proposed = Axis.first(shape.draft_vocab_size, wider.draft_vocab_size)
        forms |= {
            "markov_head.markov_w1.weight": Form((read, rank)),
            "markov_head.markov_w2.weight": Form((proposed, rank)),
        }
    return forms


@dataclass(frozen=True)
class _Probes:
    """A text of one sequence, as `PackedText` describes it."""

    token_ids_N: Tensor
    captured_NF: Tensor
    lengths: tuple[int, ...]


@torch.no_grad()
def draft_residual_size(
    shape: DrafterShape,
    tensors: Mapping[str, Tensor],
    target: ModelConfig,
    target_tensors: Mapping[str, Tensor],
) -> float:
    """Returns the largest root mean square of a drafter's residual stream before its norm, over drafts at
    every probe (`probe_tokens`). In EAGLE's family every own step reads the probe again."""
    packed = PackedTransformer(target, torch.float32)
    packed.load(target_tensors, version=0)
    token_ids_N = probe_tokens(target)
    attend = PackedCausal(target, [len(token_ids_N)])
    captured_NF = packed.forward_capturing(token_ids_N, attend.positions(), attend, shape.capture)[1]
    model = new_model(shape)
    model.load_state_dict(dict(tensors))
    if isinstance(model, BlockModel):
        text = _Probes(token_ids_N, captured_NF, (len(token_ids_N),))
        drafts = [run_blocks(model, text, [range(len(token_ids_N))], packed.embed)]
    else:
        assert isinstance(model, EagleModel)
        hidden_NE, drafts = model.fuse(captured_NF), []
        attend = PackedCausal(shape.layer, [len(token_ids_N)])
        for _ in range(shape.max_depth):
            hidden_NE = model(packed.embed(token_ids_N), hidden_NE, attend.positions(), attend)
            drafts.append(hidden_NE)
    return max(float(hidden.square().mean(-1).sqrt().max()) for hidden in drafts)

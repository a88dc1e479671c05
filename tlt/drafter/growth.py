"""Grows a drafter along with its target (hf/growth.py). It proposes the same tokens, at the cost of the
larger geometry.

    fc       (embedding ‖ hidden), e + e → E + E: each half grows in place; the constant is passed on, so that
             the head never proposes an unused id
    layer    as the target's
    d2t      unchanged; t2d marks the added ids as not proposed
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.shape import DrafterShape, EagleShape, drafter_shape
from tlt.hf.geometry import OPTION, Geometry, check_geometry
from tlt.hf.growth import NOISE, Axis, FillNoise, Form, Widening, rms
from tlt.models.decoder import ModelConfig
from tlt.types import UserError


def grow_shape(shape: DrafterShape, target: ModelConfig) -> EagleShape:
    """Returns the shape of the drafter for a grown target. UserError where a drafter of this shape cannot
    grow."""
    is_eagle = shape.method == "eagle"
    if not isinstance(shape, EagleShape) or not is_eagle or shape.owns_head or shape.has_bias:
        kind = (
            "an eagle drafter with a head or bias of its own"
            if is_eagle
            else f"a drafter of form {shape.method}"
        )
        raise UserError(
            f"{OPTION}: {kind} does not grow; give one of form eagle that TLT trained, or --drafter.path none"
        )
    grown = drafter_shape(target, "eagle", shape.draft_vocab_size if shape.is_reduced else None)
    assert isinstance(grown, EagleShape)
    check_geometry(shape.layer, Geometry("the geometry", grown.layer))
    eps = shape.layer.rms_norm_eps * shape.layer.hidden_size / target.hidden_size
    rope_theta, rope_scaling = shape.layer.rope_theta, shape.layer.rope_scaling
    layer = replace(grown.layer, rms_norm_eps=eps, rope_theta=rope_theta, rope_scaling=rope_scaling)
    return replace(grown, layer=layer)


def grow_drafter(
    small: StoredDrafter, target: ModelConfig, dtype: torch.dtype, noise: float = NOISE
) -> StoredDrafter:
    """Returns the drafter for a grown target. Of the facts about its origin only the acceptance is kept,
    because it stays the same."""
    shape, grown = small.config, grow_shape(small.config, target)
    widening, amount, prefix = (
        Widening(shape.layer, grown.layer),
        FillNoise(noise, dtype),
        grown.layer_name + ".",
    )
    layer = {
        name.removeprefix(prefix): tensor for name, tensor in small.tensors.items() if name.startswith(prefix)
    }
    tensors = {prefix + name: widening.grow(name, layer, amount, f"drafter.{name}") for name in layer}
    tensors["fc.weight"] = _grow_fc(small.tensors["fc.weight"], widening, amount)
    added = (0, target.vocab_size - shape.layer.vocab_size)
    if shape.is_reduced:
        tensors |= {"d2t": small.tensors["d2t"], "t2d": F.pad(small.tensors["t2d"], added)}
    counts_V = None if small.counts_V is None else F.pad(small.counts_V, added)
    about = {} if small.acceptance is None else {"acceptance": small.acceptance}
    return StoredDrafter(grown, tensors, about, counts_V)


def _grow_fc(values: Tensor, widening: Widening, noise: FillNoise) -> Tensor:
    small, size = widening.small.hidden_size, widening.grown.hidden_size
    halves = torch.cat([torch.arange(small), size + torch.arange(small)])
    form = Form((widening.hidden, Axis(2 * size, halves)))
    grown = form.grow(values, noise.draw(form.shape, rms(values), "drafter.fc"))
    grown[widening.constant] = 0
    grown[widening.constant, size + widening.constant] = 1
    return grown

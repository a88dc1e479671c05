"""What the parts measure: the configuration of the Countdown recipe on a device, as it is or in a large
geometry, which grows in the device's memory and is written nowhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafter_growth import grow_drafter
from benchmarks.grown import Growth, compare, describe_growth, plan_growth
from benchmarks.growth import GrownTensors
from benchmarks.subject import Subject
from tlt.apps.run.start import pin
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.types import resolve_dtype
from tlt.engine.build.model import Model

RECIPE = Path("countdown")
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 192,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
"""Sizes of a rehearsal: just above the recipe's own model."""


def recipe(settings: Mapping[str, Any], **overrides: object) -> Config:
    """Returns the recipe's configuration on the part's device. overrides: section__key = value."""
    words = {
        "run__device": settings["device"],
        "run__num_ranks": 1,
        "run__threads_per_rank": settings["threads"],
        **overrides,
    }
    return pin(load_config(RECIPE, [f"--{key.replace('__', '.')}={value}" for key, value in words.items()]))


def geometry_of(name: str, folder: Path) -> str:
    """Returns what `--geometry` takes. name: that of a geometry, or tiny."""
    if name != "tiny":
        return name
    path = folder / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@dataclass(frozen=True)
class GrownSubject:
    """A subject in a large geometry. lines: what a report says of it."""

    subject: Subject
    lines: tuple[str, ...]


def grown_subject(config: Config, geometry: str, device: torch.device) -> GrownSubject:
    """Grows the recipe's model and drafter on the device."""
    growth, dtype = plan_growth(config, geometry), resolve_dtype(config.run.dtype, device.type)
    small = growth.small
    model = grown_model(growth, dtype, device)
    agreement = compare(small, model, config)
    assert growth.drafter is not None
    drafter = grow_drafter(growth.drafter, small.config, small.tensors, growth.grown.config, dtype)
    return GrownSubject(
        Subject(config, model, drafter), tuple(describe_growth(growth, agreement, config)["lines"])
    )


def grown_model(growth: Growth, dtype: torch.dtype, device: torch.device) -> Model:
    """Returns the grown model, whose tensors are made on the device, each when it is read."""
    small, grown = growth.small, growth.grown.config
    return replace(
        small, config=grown, tensors=GrownTensors(small.config, small.tensors, grown, dtype, device=device)
    )

"""A model that transformers' own modeling file computes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tlt.models.decoder import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class AnyConfig(ModelConfig):
    """raw: config.json whole, as JSON.
    layer_windows: see `windows`.
    mixes_heads: whether layers have other head sizes or kv heads; head_dim, num_kv_heads: the largest.
    """

    raw: str = "{}"
    layer_windows: tuple[int | None, ...] = ()
    mixes_heads: bool = False

    @property
    def family(self) -> str:
        return str(json.loads(self.raw)["model_type"])

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.layer_windows

    def for_transformers(self) -> PreTrainedConfig:
        from transformers import CONFIG_MAPPING

        raw = json.loads(self.raw)
        # RL compares log-probabilities of the same text: no dropout, no jitter
        noises = {key: 0.0 for key in raw if key.endswith(("dropout", "pdrop", "jitter_noise"))}
        # of packed positions it would know the place in the batch alone; max_positions ends before it matters
        noises |= {"attn_temperature_tuning": False} if raw["model_type"] == "llama4_text" else {}
        config: PreTrainedConfig = CONFIG_MAPPING[raw["model_type"]].from_dict(raw | noises)
        return config

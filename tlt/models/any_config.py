"""What engine, update and plan read of a model that transformers' own modeling file computes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tlt.models.decoder import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class AnyConfig(ModelConfig):
    """raw: config.json whole, as JSON; the other fields are what engine and plan read.
    layer_windows: see `windows`.
    """

    raw: str = "{}"
    layer_windows: tuple[int | None, ...] = ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.layer_windows

    def for_transformers(self) -> PreTrainedConfig:
        from transformers import CONFIG_MAPPING

        raw = json.loads(self.raw)
        # RL compares log-probabilities of the same text: no dropout, no jitter
        noises = {key: 0.0 for key in raw if key.endswith(("dropout", "pdrop", "jitter_noise"))}
        config: PreTrainedConfig = CONFIG_MAPPING[raw["model_type"]].from_dict(raw | noises)
        return config

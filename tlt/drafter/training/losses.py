"""The presets of drafter training: published recipes, each with its loss.

Preset ─┬─ EaglePreset   over the drafter's own steps    eagle_loss.py
        └─ BlockPreset   over the slots of blocks        block_loss.py
"""

from __future__ import annotations

from collections.abc import Mapping

from tlt.drafter.shape import Method
from tlt.drafter.training.batch import Preset
from tlt.drafter.training.block_loss import BlockPreset
from tlt.drafter.training.eagle_loss import EaglePreset

_PRESETS: tuple[Preset, ...] = (
    # EAGLE, arXiv 2401.15077, section 4.2: features, and 0.1 times the distribution.
    EaglePreset("eagle", "eagle", 1, 1.0, 1.0, 0.1),
    # HASS, arXiv 2408.15766, section 3.2: EAGLE's losses over three steps aligned with drafting, without its
    # top-k loss. The distribution counts in full, because 0.1 was worse (benchmarks/log.md).
    EaglePreset("hass", "eagle", 3, 1.0, 1.0, 1.0),
    # EAGLE-3, arXiv 2503.01840, section 3.2: the distribution alone, over seven steps. The decay is that of
    # its training code.
    EaglePreset("eagle3", "eagle3", 7, 0.8, 0.0, 1.0),
    # DFlash's training code: cross-entropy, e^(-k/4) for short blocks. Against the target's distribution
    # instead of the sampled token.
    BlockPreset("dflash", "dflash", distribution_weight=1.0),
    # D-PACE, arXiv 2605.18810: a slot counts by the chance that a draft gets there.
    BlockPreset("dflash-pace", "dflash", distribution_weight=1.0, slots="d-pace"),
    # DSpark, arXiv 2607.05147: 0.1 cross-entropy + 0.9 L1, without its confidence head, which nothing reads.
    BlockPreset("dspark", "dspark", distribution_weight=0.1, variation_weight=0.9),
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _PRESETS}

DEFAULT_PRESET: Mapping[Method, str] = {
    "eagle": "hass",
    "eagle3": "eagle3",
    "dflash": "dflash",
    "dspark": "dspark",
}

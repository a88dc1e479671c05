"""Keys of an engine, shared by a run's configuration and the commands that generate."""

from __future__ import annotations

from typing import Literal

from tlt.base.config.section import Section
from tlt.base.value_types import BatchSize, Gib

Implementation = Literal["auto", "own", "transformers"]


class DecoderSection(Section):
    """The code that computes the model."""

    implementation: Implementation = "auto"
    """Code that computes the model (docs/models.md). own: TLT's own decoder, the fast one. transformers: the
    modeling file of transformers, with TLT's attention. auto: own where it computes the model's family, else
    transformers. The tokens are the same but for rounding."""


class EngineSection(Section):
    """The engine: which one, and how much it takes at a time."""

    engine: Literal["tlt", "vllm"] = "tlt"
    """What generates: TLT's own engine, or vLLM with the same sampling law inside (docs/vllm.md), which
    has to be installed."""
    max_batch_size: BatchSize = 64
    """Sequences that are decoded at a time, on each rank of a run."""
    kv_gib: Gib | None = None
    """GiB for keys, values and the drafter's caches, on each rank of a run. Where they are full, some
    sequences wait and are read again later; no token changes (docs/memory.md). None: four fifths of a GPU's
    free memory; on a CPU half of the machine's memory, divided by its ranks."""


class DeviceSection(Section):
    """The device that computes, and its numbers."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on. auto: GPUs where there are any, one for each rank of a run, else the CPU."""
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Number type of the engine's weights and activations; auto: bfloat16 on a GPU, else float32."""

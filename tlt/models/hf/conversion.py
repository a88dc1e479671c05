"""Names and layouts of a transformers module ↔ its checkpoints', by transformers' table.

module       model.layers.0.mlp.experts.gate_up_proj                     [experts, 2 × inner, hidden]
checkpoint   model.layers.0.mlp.experts.0.gate_proj.weight, …            [inner, hidden] each
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from tlt.models.any_config import AnyConfig
from tlt.models.decoder import ModelConfig
from tlt.models.hf.text_part import MODULE, NEWEST, in_layout, layout_of, renamed


@dataclass(frozen=True)
class Sources:
    """Stored tensors that become a module's tensor, and the pattern that each matches; None: as it is."""

    names: tuple[str, ...]
    patterns: tuple[str | None, ...]

    @property
    def is_alone(self) -> bool:
        return self.patterns == (None,)


class SameNames:
    left_out: Collection[str] = ()
    """Patterns of transformers."""

    def sources(self, stored: Iterable[str]) -> dict[str, Sources]:
        return {name: Sources((name,), (None,)) for name in stored}

    def is_left_out(self, name: str) -> bool:
        """Whether a checkpoint's surplus tensor, by the module's name, is no part of the model: rotary
        frequencies of old transformers, and what transformers leaves out (multi-token prediction)."""
        return name.endswith("rotary_emb.inv_freq") or any(re.search(one, name) for one in self.left_out)

    def to_module(self, name: str, sources: Sources, read: Callable[[str], Tensor]) -> Tensor:
        return read(sources.names[0])

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)


class Conversion(SameNames):
    def __init__(self, config: AnyConfig) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        from tlt.models.any import AnyTransformer

        with torch.device("meta"):
            self.module = AnyTransformer(config).module
        self.left_out = self.module._keys_to_ignore_on_load_unexpected or ()
        table = get_model_conversion_mapping(self.module)
        self.renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in table if isinstance(entry, WeightConverter)]

    def sources(self, stored: Iterable[str]) -> dict[str, Sources]:
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        found: dict[str, list[tuple[str, str | None]]] = {}
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = rename_source_key(name, self.renamings, self.converters)
            found.setdefault(target, []).append((name, pattern))
        return {target: Sources(*map(tuple, zip(*parts, strict=True))) for target, parts in found.items()}

    def to_module(self, name: str, sources: Sources, read: Callable[[str], Tensor]) -> Tensor:
        if sources.is_alone:
            return read(sources.names[0])
        (converter,) = (one for one in self.converters if sources.patterns[0] in one.source_patterns)
        converter = deepcopy(converter)
        for source, pattern in zip(sources.names, sources.patterns, strict=True):
            # a tensor, as transformers' own saving adds it
            converter.add_tensor(name, source, pattern, read(source))  # type: ignore[arg-type]
        converted = converter.convert(name, model=self.module, config=self.module.config)[name]
        tensor: Tensor = converted[0] if isinstance(converted, list) else converted
        return tensor

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        converted: dict[str, Tensor] = revert_weight_conversion(self.module, dict(tensors))
        return converted


class TextPart(SameNames):
    def __init__(self, inner: SameNames) -> None:
        self.inner, self.left_out = inner, inner.left_out

    def sources(self, stored: Iterable[str]) -> dict[str, Sources]:
        stored = list(stored)
        layout = layout_of(stored)
        named = {text: name for name in stored if (text := renamed(name, layout, MODULE)) is not None}
        return {
            target: replace(found, names=tuple(named[name] for name in found.names))
            for target, found in self.inner.sources(named).items()
        }

    def to_module(self, name: str, sources: Sources, read: Callable[[str], Tensor]) -> Tensor:
        return self.inner.to_module(name, sources, read)

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return in_layout(self.inner.to_checkpoint(tensors), NEWEST)


@lru_cache
def conversion_of(config: ModelConfig) -> SameNames:
    inner = Conversion(config) if isinstance(config, AnyConfig) else SameNames()
    return TextPart(inner) if config.is_text_part else inner

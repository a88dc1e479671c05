"""A model that our decoder does not compute: what is to be known of it where an engine loads the weights
itself.

Knows no tensors, and not which engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tlt.hf.files import existing_directory
from tlt.io.text import one_line
from tlt.types import UserError


class Limits(Protocol):
    """Bounds of token ids and of positions; a ModelConfig has them, too."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...


@dataclass(frozen=True)
class ForeignConfig:
    """What is read of a foreign config.json. vocab_size: rows of the embedding.
    max_positions: of the longest sequence."""

    vocab_size: int
    max_positions: int


def read_limits(path: Path) -> Limits:
    """Reads config.json as transformers does, which knows every family's defaults and other names for the
    same thing. UserError where it knows no such model, or one without bounds."""
    from transformers import AutoConfig

    source = existing_directory(path) / "config.json"
    try:
        config = AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        ).get_text_config()
    except Exception as error:  # transformers refuses by exceptions of many kinds
        remedy = "correct it, or give a model that the installed transformers knows"
        raise UserError(f"{source}: transformers cannot read it ({one_line(error, 160)}); {remedy}") from None
    return ForeignConfig(
        _bound(config, "vocab_size", source), _bound(config, "max_position_embeddings", source)
    )


def _bound(config: Any, name: str, source: Path) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{source}: {name} is {value!r}; it must be a positive integer")
    return value

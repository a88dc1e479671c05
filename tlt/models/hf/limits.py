"""Vocabulary size and window of a model that only another engine computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tlt.base.io.text import one_line
from tlt.base.types import UserError
from tlt.models.hf.files import existing_directory


class Limits(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...


@dataclass(frozen=True)
class ForeignConfig:
    vocab_size: int
    max_positions: int


def read_limits(path: Path) -> Limits:
    """Raises UserError for an unknown model, or missing limits."""
    from transformers import AutoConfig

    source = existing_directory(path) / "config.json"
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        config = config.get_text_config()
    except Exception as error:  # transformers refuses by exceptions of many kinds
        remedy = "correct it, or give a model that the installed transformers knows"
        raise UserError(f"{source}: transformers cannot read it ({one_line(error, 160)}); {remedy}") from None
    names = ("vocab_size", "max_position_embeddings")
    return ForeignConfig(*(_positive(getattr(config, name, None), name, source) for name in names))


def _positive(value: object, name: str, source: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{source}: {name} is {value!r}; it must be a positive integer")
    return value

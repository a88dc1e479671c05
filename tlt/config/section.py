"""What all sections of the configuration share: their base, and how keys are explained. Knows no section."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tlt.config.mistakes import mistake

LONGEST_NAME = 255
"""Bytes of a file's name."""

AnyPath = Annotated[Path, Field(strict=False)]


def split_words(value: Any) -> Any:
    """Returns the words of a text with commas between them, a number as a list of one; anything else as it is."""
    if isinstance(value, int | float):
        return [value]
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


class Explained(BaseModel):
    """A model whose fields are explained by the docstrings below them: each is one paragraph, however its lines break."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @field_validator("*")
    @classmethod
    def _a_path_can_be_one(cls, value: Any) -> Any:
        """Refuses what no file can be called, before the system does: it holds a NUL or half a character, or is too long."""
        if isinstance(value, Path):
            try:
                parts = [os.fsencode(part) for part in value.parts]
            except UnicodeEncodeError:
                parts = [b"\0"]
            if any(b"\0" in part or len(part) > LONGEST_NAME for part in parts):
                raise mistake("no file can be called so: give another path")
        return value

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split()) or None


class Section(Explained):
    """The base of all sections: no unknown keys, no silent conversions, no later changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)

"""The bases of all sections and options."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from tlt.base.config.mistakes import mistake

LONGEST_NAME = 255
"""Bytes of a file's name."""
LONGEST_PATH = 3072
"""Bytes of a path: 1,024 fewer than Linux takes, which leaves room for the names that a run writes below
it."""

AnyPath = Annotated[Path, Field(strict=False)]


def _read_day(value: Any) -> Any:
    if value is None:
        return None
    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise mistake("it must be a date such as 2026-11-26") from None


Day = Annotated[str, BeforeValidator(_read_day)]


def split_words(value: Any) -> Any:
    """Splits text at its commas, and makes a number a list of one; anything else stays as it is."""
    if isinstance(value, int | float):
        return [value]
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def takes_a_path(annotation: Any) -> bool:
    return annotation is Path or any(map(takes_a_path, get_args(annotation)))


class Explained(BaseModel):
    """A model whose fields the docstrings below them explain. A field that is declared again, with another
    default, keeps the text that it inherits."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _a_path_is_not_empty(cls, value: Any, info: ValidationInfo) -> Any:
        """A shell's unset variable gives an empty text, which as a path is the working directory."""
        is_empty = isinstance(value, str) and not value.strip()
        if is_empty and takes_a_path(cls.model_fields[str(info.field_name)].annotation):
            raise mistake("it is empty: give a path (the working directory is .)")
        return value

    @field_validator("*")
    @classmethod
    def _a_path_can_be_one(cls, value: Any) -> Any:
        if isinstance(value, Path):
            try:
                parts = [os.fsencode(part) for part in value.parts]
            except UnicodeEncodeError:
                parts = [b"\0"]
            is_too_long = sum(len(part) + 1 for part in parts) > LONGEST_PATH
            if is_too_long or any(b"\0" in part or len(part) > LONGEST_NAME for part in parts):
                raise mistake("no file can be called so: give another path")
        return value

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name, field in cls.model_fields.items():
            inherited = (getattr(base, "model_fields", {}).get(name) for base in cls.__mro__[1:])
            texts = (field.description, *(known.description for known in inherited if known is not None))
            field.description = next((" ".join(text.split()) for text in texts if text), None)


class Section(Explained):
    """The base of all sections: no unknown keys, no silent conversions, no later changes."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

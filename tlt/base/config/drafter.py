"""The section [drafter]."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from tlt.base.config.mistakes import mistake
from tlt.base.config.section import AnyPath, Section
from tlt.base.types import UserError
from tlt.base.value_types import MOST_DRAFTED, DraftVocab, LearningRate


def _is_vocabulary(value: Any) -> Any:
    is_number = type(value) is int and value >= 2
    if is_number and value > MOST_DRAFTED:
        raise mistake(f"it must be less than or equal to {MOST_DRAFTED}")
    if is_number or value in ("auto", "full"):
        return value
    raise mistake("it must be auto, full, or a number of 2 or more")


def _read_vocabulary(value: Any) -> Any:
    return _is_vocabulary(int(value) if isinstance(value, str) and value.isdecimal() else value)


DraftVocabKey = Annotated[DraftVocab, BeforeValidator(_is_vocabulary)]
DraftVocabOption = Annotated[DraftVocab, BeforeValidator(_read_vocabulary)]
"""The same, which also reads a number written as text."""


def check_served(vocabulary: DraftVocab, place: str) -> None:
    """Raises UserError for a number: vLLM does not cut a drafter's vocabulary."""
    if isinstance(vocabulary, int):
        raise UserError(f"{place}: {vocabulary} is for TLT's own engine; leave it out, or give engine tlt")


class DrafterSection(Section):
    """The drafter, and how idle ranks train it."""

    path: AnyPath | None = None
    """A drafter folder, as tlt drafter train writes it; None: drafts come from retrieval alone."""
    vocabulary: DraftVocabKey = "auto"
    """Tokens that the drafter may propose. A number N: the N most frequent tokens of the run's own responses.
    full: all tokens. auto: all, or fewer where the drafter's head takes a tenth of a forward or more. Changes
    the speed alone."""
    train: bool = False
    """Whether idle ranks train the drafter, as long as that gains more time than it costs the busy ranks."""
    learning_rate: LearningRate = 3e-4
    """Learning rate of the drafter's training in idle time."""

"""What a user asks of speculation is parsed once, and written back as it was read."""

from __future__ import annotations

import pytest

from tlt.base.config.rollout import RolloutSection
from tlt.base.speculation import Adaptive, Fixed, Off, parse_speculation
from tlt.base.strategy import Strategy


@pytest.mark.parametrize("text", ["off", "adaptive", "4x1x4", "ngram:3x1x3", "ahead+hybrid:64x1x64"])
def test_what_is_parsed_is_written_back(text: str) -> None:
    assert str(parse_speculation(text)) == text
    section = RolloutSection(speculation=text)
    assert section.speculation == parse_speculation(text)
    assert section.model_dump()["speculation"] == section.model_dump(mode="json")["speculation"] == text
    assert RolloutSection.model_validate(section.model_dump()) == section


def test_three_types_say_which() -> None:
    assert (parse_speculation("off"), parse_speculation("adaptive")) == (Off(), Adaptive())
    unnamed, named = parse_speculation("4x2x8"), parse_speculation("ngram:3x1x3")
    assert isinstance(unnamed, Fixed)
    assert isinstance(named, Fixed)
    assert unnamed.drafted_by("learned") == Strategy("learned", 4, 2, 8)
    assert named.drafted_by("learned") == Strategy("ngram", 3, 1, 3)

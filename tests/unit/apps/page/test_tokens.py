"""The tokens of a response on the page: their text, who drafted each, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.apps.page.synthetic import DRAFTS, make_coloured
from tlt.apps.page.gather import read_run
from tlt.apps.page.kept import show_responses
from tlt.apps.page.tokens import MAX_CHARACTERS, clip


@pytest.mark.parametrize("length", [1, 2, 7, 999, 1500])
def test_a_clipped_text_holds_whole_tokens_and_says_where_they_lie(length: int) -> None:
    pieces = [chr(97 + i % 26) * (length if i % 3 else 0) for i in range(6000 // length + 4)]
    text, stretches = clip(pieces, 10_000)
    (first, head), (begin, tail) = stretches
    assert first == 0
    assert text.startswith("".join(pieces[: len(head)]) + "\n[… ")
    assert text.endswith(" characters …]\n" + "".join(pieces[begin:]))
    assert head + tail == [len(piece) for piece in pieces[: len(head)] + pieces[begin:]]
    assert begin + len(tail) == len(pieces)
    shown = sum(head) + sum(tail)
    assert MAX_CHARACTERS - 2 * length < shown <= MAX_CHARACTERS
    assert f"[… {sum(map(len, pieces)) - shown:,} characters …]" in text
    text, ((_, head), (begin, tail)) = clip(["a"] * 900, 800)
    assert (text, head, begin, tail) == (
        "a" * 400 + "\n[… 100 characters …]\n" + "a" * 400,
        [1] * 400,
        500,
        [1] * 400,
    )
    assert clip(pieces[:2]) == ("".join(pieces[:2]), [(0, [0, length])])


def test_a_response_has_its_tokens_and_its_drafts_on_the_page(tmp_path: Path) -> None:
    folder = make_coloured(tmp_path / "run")
    shown, (note,) = show_responses([read_run(folder, "run")])
    assert "coloured" not in note
    kept = json.loads((folder / "responses" / "rollout-00000001.jsonl").read_text("utf-8"))
    ((first, lengths),) = shown[0]["stretches"]
    assert (first, len(lengths), sum(lengths)) == (0, len(kept["token_ids"]), len(kept["text"]))
    assert shown[0]["text"] == kept["text"]
    assert [draft[:4] for draft in shown[0]["drafts"]] == [list(draft[:4]) for draft in DRAFTS]
    assert shown[0]["drafted"].startswith("Drafted and accepted: 5 of 12 tokens (learned drafter 2, ")

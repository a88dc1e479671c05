"""The tokens of a response on the page: their text, who drafted each, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.apps.page.synthetic import DRAFTS, make_coloured
from tlt.apps.page.gather import read_run
from tlt.apps.page.kept import show_responses
from tlt.apps.page.tokens import MAX_CHARACTERS, clip, drafts_within, sum_up
from tlt.base.types import DraftOutcome


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


def test_drafts_of_what_is_left_out_are_left_out_and_all_are_summed_up() -> None:
    drafts = [DraftOutcome(place, "learned", 4, 2, 5) for place in range(0, 30, 3)]
    shown = drafts_within(drafts, [(0, [1] * 4), (27, [1] * 3)], str)
    assert [draft[0] for draft in shown] == [0, 3, 27]
    assert shown[0] == [0, "learned", 4, 2, "5"]
    line = "Drafted and accepted: 19 of 29 tokens (learned drafter 19); 10 verifications of 2.90 tokens"
    cut = [*drafts[:-1], DraftOutcome(28, "learned", 4, 3, 5)]  # the response ends within the last one
    assert sum_up(cut, 29) == f"{line.replace('2.90', '2.80')}; rejected: 19 drafted tokens."
    assert sum_up([], 29) == "Drafted and accepted: none of 29 tokens."


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


def test_what_is_not_coloured_is_said_with_its_reason(tmp_path: Path) -> None:
    folder = make_coloured(tmp_path / "run")
    path = folder / "responses" / "rollout-00000001.jsonl"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "text": "another"}) + "\n")
    shown, (note,) = show_responses([read_run(folder, "run")])
    assert "drafts" not in shown[0]
    assert note.endswith("tokens of 1 are not coloured, for the tokenizer gives another text")
    del kept["drafts"]
    path.write_text(json.dumps(kept) + "\n")
    shown, (note,) = show_responses([read_run(folder, "run")])
    assert note.endswith("for vLLM on a GPU does not tell who drafted them")
    assert shown[0]["text"] == kept["text"]

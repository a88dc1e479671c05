"""The tokens of a response on the page: their text, who drafted each, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.apps.page.synthetic import DRAFTS, TURNS, make_coloured, make_conversation
from tlt.apps.page.gather import read_run
from tlt.apps.page.response_sample import show_responses
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


def test_a_response_of_several_turns_is_a_conversation(tmp_path: Path) -> None:
    (shown,), _ = show_responses([read_run(make_conversation(tmp_path / "run"), "run")])
    told = [(part["by"], part["label"], part["text"]) for part in shown["parts"]]
    assert told == [
        ("model", "turn 1", TURNS[0][0]),
        ("tool", "add: result", "46"),
        ("model", "turn 2", TURNS[1][0]),
        ("error", "multiply: error", '{"error": "no"}'),
        ("model", "turn 3", TURNS[2][0]),
    ]
    assert (shown["turns"], shown["tokens"]) == (3, 13)
    assert shown["told"] == (
        "3 turns, 2 calls (1 failed, 0 of them by time-out); 6 tokens were given; "
        "waited 0.25 s for tools and environment."
    )
    assert shown["drafted"] == (
        "Drafted and accepted: 8 of 13 tokens (learned drafter 3, reference 2, retrieval 3); 4 verifications of "
        "2.75 tokens; rejected: 3 drafted tokens."
    )
    first, second, third = (part for part in shown["parts"] if part["by"] == "model")
    assert [draft[:4] for draft in first["drafts"]] == [[0, "learned", 4, 3], [4, "ahead", 4, 2]]
    assert [draft[:4] for draft in second["drafts"]] == [[10, "ngram", 3, 1]]
    assert [draft[:4] for draft in third["drafts"]] == [[16, "ngram", 2, 2]]
    assert [part["stretches"] for part in (first, second, third)] == [
        [(0, [1] * 6)],
        [(10, [1] * 4)],
        [(16, [1, 1, 0])],
    ]


def test_a_long_conversation_is_clipped(tmp_path: Path) -> None:
    folder = make_conversation(tmp_path / "run")
    path = folder / "responses" / "rollout-00000001.jsonl"
    kept = json.loads(path.read_text("utf-8"))
    num, pair = 500, [{"role": "assistant", "content": "1" * 999}, {"role": "user", "content": "2" * 9999}]
    given = [[n, n] for n in range(num)]
    turns = kept["turns"] | {"given": given, "messages": pair * num, "last_turn": "end"}
    long = {"token_ids": [3] * num, "text": "1" * num, "drafts": None, "turns": turns}
    path.write_text(json.dumps(kept | long), encoding="utf-8")
    (shown,), (note,) = show_responses([read_run(folder, "run")])
    assert "tokens of 1 are not coloured" in note
    labels = [part["label"] for part in shown["parts"] if part["by"] == "model"]
    assert labels == [f"turn {n}" for n in (*range(1, 21), *range(482, 502))]
    assert "[… 461 turns …]" in [part["text"] for part in shown["parts"]]
    assert shown["parts"][-1]["text"] == "end"
    assert len(json.dumps(shown)) < 40_000

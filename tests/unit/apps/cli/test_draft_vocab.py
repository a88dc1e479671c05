"""The draft vocabulary as commands, calls and configurations name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tlt
from tests.unit.apps.cli.parts import fail, generate, read_lines, refuse, succeed, write_lines
from tlt.base.config.load import load_config
from tlt.base.types import UserError

VOCAB = 61


@pytest.fixture
def drafter(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A drafter of that model, which knows what it was trained on."""
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"}, {"prompt": "[1:1]"})
    write_lines("responses.jsonl", {"prompt_ids": [2, 3], "token_ids": [4, 5, 6, 7, 1]})
    words = "--responses responses.jsonl --tokens-per-micro-step 16 --out drafter --draft-vocab 6"
    summary = succeed(capsys, "drafter", "train", str(model), *words.split())
    assert (summary["draft_vocab"], summary["coverage"]) == (6, 1.0)
    return here / "drafter"


def test_tokens_are_the_same_with_any_draft_vocabulary(
    model: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Any] = []
    drafted = ["--speculation", "4x1x4", "--drafter", str(drafter), "--draft-vocab"]
    for given in ([], *([*drafted, vocabulary] for vocabulary in ("3", "full", "auto"))):
        generate(capsys, model, "--samples", "3", "--max-tokens", "30", *given)
        rows = read_lines("out.jsonl")
        found.append([(row["problem_id"], row["sample_index"], row["token_ids"]) for row in rows])
    assert found[0] == found[1] == found[2] == found[3]
    engine = tlt.Engine.from_pretrained(model, drafter=drafter, speculation="4x1x4", vocabulary=3)
    assert engine.generate(["1+2="], max_tokens=12)[0].token_ids
    assert engine._engine.drafter.learned.model.num_proposed == 3  # type: ignore[union-attr]  # it has one


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("given", "told"), [
    ("1", "--draft-vocab: is 1; it must be auto, full, or a number of 2 or more"),
    ("some", "--draft-vocab: is some; it must be auto, full, or a number of 2 or more"),
])  # fmt: skip
def test_what_is_no_draft_vocabulary_is_refused_in_one_line(
    given: str, told: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refuse(capsys, model, "--draft-vocab", given)


def test_vllm_is_asked_for_no_number(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "9 is for TLT's own engine; leave it out, or give engine tlt"
    assert f"--draft-vocab: {told}" in refuse(capsys, model, "--engine", "vllm", "--draft-vocab", "9")
    with pytest.raises(UserError, match=f"vocabulary: {told}"):
        tlt.Engine.from_pretrained(model, engine="vllm", vocabulary=9)


def test_a_configuration_names_it_as_a_number_or_a_word(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npath = "{model}"\n[task]\nname = "countdown"\n[drafter]\nvocabulary = 300\n')
    assert load_config(file).drafter.vocabulary == 300
    assert load_config(file, ["--drafter.vocabulary", "full"]).drafter.vocabulary == "full"
    assert load_config(file, ["--drafter.vocabulary", "77"]).drafter.vocabulary == 77
    with pytest.raises(UserError, match=r"--drafter.vocabulary: drafter.vocabulary is 'most'; it must be"):
        load_config(file, ["--drafter.vocabulary", "most"])


def test_an_eagle_drafter_is_exported_without_one_and_says_so_if_asked(
    model: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("drafter", "export", str(drafter), "--target", str(model), "--format", "vllm-eagle")
    told = fail(capsys, *common, "--to", "out", "--draft-vocab", "9")
    assert "--draft-vocab: 9 has no place in vllm-eagle" in told
    assert succeed(capsys, *common, "--to", "out")["draft_vocab"] == VOCAB
    assert not (Path("out") / "token_counts.json").exists()
    assert json.loads((drafter / "token_counts.json").read_text())["token_ids"] == [1, 4, 5, 6, 7]

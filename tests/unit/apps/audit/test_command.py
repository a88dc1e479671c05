"""`tlt audit`: its exit codes, its report and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.apps.cli.parts import fail, write_lines
from tlt.apps.cli import main as cli

PROMPTS = "--prompts prompts.jsonl"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = cli.main(("audit", *arguments))
    captured = capsys.readouterr()
    assert code in (0, 1, 3), captured.err
    return code, json.loads(captured.out.splitlines()[-1]), captured.out


def test_our_engine_is_lossless_with_exit_code_0(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At temperature 0, where every token is compared."""
    arguments = "--prompts prompts.jsonl --temperature 0 --samples 1 --max-tokens 30"
    code, summary, text = run(capsys, "engine", str(model), *arguments.split())
    assert (code, summary["lossless"]) == (0, True)
    assert text.startswith("off: lossless; ")


def test_too_few_tokens_are_undecided_with_exit_code_3(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--prompts prompts.jsonl --samples 20 --max-tokens 30 --out new/report.json"
    code, summary, text = run(capsys, "engine", str(model), *arguments.split())
    assert code == 3
    assert summary["lossless"] is None
    (mode,) = json.loads(Path("new/report.json").read_text())["modes"]
    assert (mode["verdict"], mode["is_lossless"]) == ("undecided", None)
    needed = max(mode["tokens_for_power"].values())
    has = f"needs {needed:,} tokens, and has {mode['num_tokens']:,}"
    assert text.startswith(f"off: undecided: no evidence against; {has}; ")
    assert run(capsys, "engine", str(model), *arguments.split(), "--few-tokens-pass")[0] == 0
    assert mode["num_responses"] == 40
    assert mode["offenders"][0]["expected_text"]


def test_another_temperature_than_said_is_exit_code_1(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = ["generate", str(model), "--prompts", "prompts.jsonl", "--samples", "30", "--max-tokens", "40"]
    assert cli.main([*generate, "--temperature", "0.5", "--out", "sharp.jsonl"]) == 0
    capsys.readouterr()
    code, summary, text = run(capsys, "responses", str(model), "sharp.jsonl", "--temperature", "0.5")
    assert (code, summary["lossless"]) == (3, None)
    code, summary, text = run(capsys, "responses", str(model), "sharp.jsonl")
    assert (code, summary["lossless"]) == (1, False)
    assert text.startswith("sharp.jsonl: NOT lossless: the tokens follow another law")
    assert "\n  response " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--prompts: give the prompts to answer"),
        (f"{PROMPTS} --url http://127.0.0.1:9", "--url: unknown option; see tlt audit engine --help"),
        (f"{PROMPTS} --stop x", "--stop: unknown option; did you mean"),
        (f"{PROMPTS} --speculation off,learned:4x1x4", "'learned:4x1x4' needs a drafter"),
        (f"{PROMPTS} --alpha 0", "--alpha: is 0; it must be greater than 0"),
        (f"{PROMPTS} --out prompts.jsonl/report.json", "prompts.jsonl is no folder; give another path"),
        ("--task nonsense", "unknown task 'nonsense'"),
    ],
)
def test_every_mistake_is_one_line(
    arguments: str, message: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(capsys, "audit", "engine", str(model), *arguments.split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("server MODEL --url nonsense --engine-model m --task countdown", "cannot be reached"),
        (f"server MODEL --url http://127.0.0.1:9 {PROMPTS}", "audit server: needs --engine-model"),
        ("server MODEL --url http://127.0.0.1:9 --engine-model m", "--prompts: give the prompts to answer"),
        ("responses MODEL", "audit responses: needs FILE"),
        ("responses MODEL no.jsonl", "FILE: no.jsonl does not exist"),
        (f"responses MODEL no.jsonl {PROMPTS}", "--prompts: unknown option"),
        (
            "MODEL --task countdown",
            "unknown command; commands are audit engine, audit server, audit responses",
        ),
    ],
)
def test_every_mistake_about_another_engine_is_one_line(
    command: str, message: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(capsys, *f"audit {command}".replace("MODEL", str(model)).split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt_ids": [5]}, "r.jsonl:1: token_ids must be a list"),
        ({"prompt_ids": [5], "token_ids": []}, "need at least one token each"),
        ({"prompt_ids": [5], "token_ids": [99]}, "token id 99 is outside the vocabulary of 23"),
        ({"prompt_ids": [5], "token_ids": [6] * 99}, "has 100 tokens but the model's window is 64"),
        ({"prompt_ids": [5], "token_ids": [6], "logprobs": [0.0, 0.0]}, "1 token_ids but 2 logprobs"),
        ({"prompt_ids": [5], "token_ids": [6], "logprobs": [None]}, "logprobs is [None]; give a number"),
        ({"prompt_ids": [5], "token_ids": [6], "finish_reason": "stop"}, "keep the token that ended it"),
    ],
)
def test_every_mistake_in_a_file_of_responses_is_one_line(
    line: dict[str, Any], message: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("r.jsonl", line)
    assert message in fail(capsys, "audit", "responses", str(model), "r.jsonl")


def test_a_folder_without_a_model_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no model" in fail(capsys, "audit", "engine", str(here), "--prompts", "prompts.jsonl")
    (here / "config.json").write_text("{}")
    assert "transformers cannot load it" in fail(
        capsys, "audit", "engine", str(here), "--prompts", "prompts.jsonl"
    )

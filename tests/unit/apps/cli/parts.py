"""What the tests of the command line share: a tokenizer, files, and commands that succeed or fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tlt.apps.cli import main as cli
from tlt.apps.cli.commands import COMMANDS, find_command

VOCABULARY = ("<pad>", "<eos>", *"0123456789+-*/=,:[]x!")
WINDOW = 64


def save_tokenizer(
    path: Path, vocabulary: tuple[str, ...] = VOCABULARY, chat_template: str | None = None
) -> None:
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[])
    )
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = chat_template
    fast.save_pretrained(path)


def write_lines(path: str, *records: Any) -> None:
    Path(path).write_text(
        "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)
    )


def read_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def succeed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON, the last line on stdout. Its summary for a terminal is made, too."""
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    record: dict[str, Any] = json.loads(captured.out.splitlines()[-1])
    summarize = COMMANDS[find_command(arguments)[0]].summarize
    assert summarize is not None
    assert summarize(record).headline
    return record


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a refusal: exit code 2, one line on stderr, nothing on stdout, no file left behind."""
    before = sorted(Path.cwd().iterdir())
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tlt: error: ")
    assert captured.err.count("\n") == 1
    assert sorted(Path.cwd().iterdir()) == before
    return captured.err.removeprefix("tlt: error: ").rstrip("\n")


def generate(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> dict[str, Any]:
    options = ("--prompts", "prompts.jsonl", "--out", "out.jsonl", "--max-tokens", "8")
    return succeed(capsys, "generate", str(model), *options, *arguments)


def refuse(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> str:
    return fail(
        capsys, "generate", str(model), "--prompts", "prompts.jsonl", "--out", "out.jsonl", *arguments
    )

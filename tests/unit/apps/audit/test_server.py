"""`tlt audit server`: token ids from an OpenAI-compatible server, and servers that give none."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.apps.audit.conftest import Answer
from tests.unit.apps.audit.test_command import run
from tests.unit.apps.cli.parts import fail
from tlt.apps.audit import server as asked
from tlt.apps.audit.referee import Referee
from tlt.apps.cli import main as cli

PROMPTS = ("--engine-model", "m", "--prompts", "prompts.jsonl")
ARGUMENTS = (*PROMPTS, "--samples", "25", "--max-tokens", "12")


@cache
def sampled(
    model: Path, temperature: float, prompt: tuple[int, ...], stop: frozenset[int], length: int, seed: int
) -> list[int]:
    """Tokens of the model itself, one forward per token; by its seed a response is the same whoever asks
    for it."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    while len(tokens) < length and not (tokens and tokens[-1] in stop):
        (logits,) = referee_of(model).logits([*prompt, *tokens], [0])
        p = (logits[0].double() / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(p, 1, generator=generator)))
    return tokens


referee_of = cache(Referee)


def sampler(model: Path, temperature: float = 1.0) -> Answer:
    """A server that samples the model."""
    referee_of(model)  # before threads ask for it at once

    def answer(payload: dict[str, Any]) -> dict[str, Any]:
        stop, prompt = frozenset(payload["stop_token_ids"]), tuple(payload["prompt"])
        tokens = sampled(model, temperature, prompt, stop, payload["max_tokens"], payload["seed"])
        choice: dict[str, Any] = {"finish_reason": "stop" if tokens[-1] in stop else "length"}
        if payload.get("return_token_ids"):
            choice["token_ids"] = tokens
        return {"choices": [choice]}

    return answer


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 3), (0.5, 1)])
def test_a_server_is_judged(
    temperature: float,
    expected: int,
    model: Path,
    here: Path,
    serve: Callable[[Answer], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = serve(sampler(model, temperature))
    code, summary, _ = run(capsys, "server", str(model), "--url", url, *ARGUMENTS)
    assert code == expected
    assert list(summary["modes"]) == [url]


def wire(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, *([] if headers else [f"Content-Length: {len(body)}"]), "", ""]
    return "\r\n".join(lines).encode() + body


BROKEN = {
    "cut off": (wire(b'{"choices"', "200 OK", "Content-Length: 999"), "gives no whole answer of HTTP"),
    "cut off within a chunk": (
        wire(b"40\r\n{", "200 OK", "Transfer-Encoding: chunked"),
        "gives no whole answer of HTTP",
    ),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "gives no whole answer of HTTP"),
    "no text": (wire(b'"\xff\xfe"'), "answers no JSON"),
    "deep": (wire(b"[" * 100_000), "answers no JSON"),
    "a long number": (wire(b'{"choices": ' + b"9" * 5000 + b"}"), "answers no JSON"),
    "two choices": (wire(b'{"choices": [{}, {}]}'), "answered without one choice"),
    "an error in a good answer": (wire(b'{"error": {"message": "no such model"}}'), "no such model"),
    "logprobs a list": (wire(b'{"choices": [{"logprobs": [1]}]}'), "returns no token ids"),
    "a fraction as an id": (wire(b'{"choices": [{"token_ids": [1.7]}]}'), "no list of ids"),
    "an id beyond the vocabulary": (
        wire(b'{"choices": [{"token_ids": [23]}]}'),
        "token id 23 is outside the vocabulary of 23",
    ),
    "more than the window": (
        wire(json.dumps({"choices": [{"token_ids": [5] * 64}]}).encode()),
        "the model's window is 64",
    ),
    "no ids": (wire(b'{"choices": [{"token_ids": []}]}'), "look at the server's log"),
    "a refusal that is cut off": (wire(b"no", "404 No", "Content-Length: 99"), "refuses (404"),
    "a redirect to nowhere": (wire(b"", "302 Found", "Location: ://"), ""),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_answer_is_one_line(
    kind: str, model: Path, here: Path, serve: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    answer, message = BROKEN[kind]
    line = fail(capsys, "audit", "server", str(model), "--url", serve(lambda payload: answer), *PROMPTS)
    assert "--url: http://127.0.0.1" in line
    assert message in line


BUSY = wire(b"later", "503 Busy", "Retry-After: 0", "Content-Length: 5")
LATER = "Thu, 01 Jan 1970 00:00:00 GMT"


@pytest.mark.parametrize(
    "failure",
    [
        BUSY,
        wire(b"", "429 Too Many", f"Retry-After: {LATER}", "Content-Length: 0"),
        wire(b'{"choices"', "200 OK", "Content-Length: 999"),
        b"",
    ],
)
def test_a_server_that_is_busy_for_a_moment_is_asked_again(
    failure: bytes,
    model: Path,
    here: Path,
    serve: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every third request fails, but the first, by which the server is known."""
    monkeypatch.setattr(asked, "_WAITS", (0.0,) * 6)
    good, count = sampler(model), itertools.count()
    url = serve(lambda payload: failure if next(count) % 3 == 1 else good(payload))
    few = (*PROMPTS, "--samples", "6", "--max-tokens", "12")
    code, summary, output = run(capsys, "server", str(model), "--url", url, *few)
    assert (code, summary["lossless"]) == (3, None)
    assert "12 responses" in output
    assert "missing" not in output


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 3), (0.5, 1)])
def test_answers_that_came_before_a_server_went_away_are_judged_and_the_others_counted(
    temperature: float,
    expected: int,
    model: Path,
    here: Path,
    serve: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asked, "_WAITS", (0.0,) * 2)
    good, count = sampler(model, temperature), itertools.count()
    url = serve(lambda payload: good(payload) if next(count) <= 45 else BUSY)
    words = [*ARGUMENTS, "--max-concurrency", "1", "--few-tokens-pass", "--out", "report.json"]
    code = cli.main(["audit", "server", str(model), "--url", url, *words])
    captured = capsys.readouterr()
    assert code == expected
    assert "tlt: 5 of 50 responses are missing, the others are judged: " in captured.err
    assert "is busy (503: later)" in captured.err
    assert json.loads((here / "report.json").read_text())["modes"][0]["num_missing"] == 5
    assert ("5 responses are missing" in captured.out) == (expected == 3)


KEY, VARIABLE = "a key of the server's", "OF_THE_SERVER"


def test_an_api_key_is_read_from_the_variable_that_is_named_and_written_nowhere(
    model: Path,
    here: Path,
    serve: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = serve(sampler(model, 1.0), key=KEY)
    monkeypatch.setenv(VARIABLE, f"{KEY}\n")
    words = ["--samples", "2", "--max-tokens", "4", "--out", "report.json", "--api-key-variable", VARIABLE]
    code, _, said = run(capsys, "server", str(model), "--url", url, *PROMPTS, *words)
    assert code == 3
    assert KEY not in said + (here / "report.json").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "not authorized by None\"}); export its API key, and give --api-key-variable the variable's name",
        ),
        (
            ["--api-key-variable", "WRONG"],
            'not authorized by Bearer ***"}); correct the key that --api-key-variable names',
        ),
        (["--api-key-variable", "NOT_SET"], "NOT_SET is not set, or is empty; export the server's API key"),
    ],
)
def test_a_server_that_wants_a_key_is_told_apart_from_one_that_wants_another_model(
    words: list[str],
    message: str,
    model: Path,
    here: Path,
    serve: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = serve(sampler(model, 1.0), key=KEY)
    monkeypatch.setenv("WRONG", "another key")
    line = fail(capsys, "audit", "server", str(model), "--url", url, *PROMPTS, *words)
    assert message in line
    assert "another key" not in line


@pytest.mark.parametrize("is_strict", [False, True])
def test_options_that_are_off_are_sent_unless_the_server_refuses_them(
    is_strict: bool, model: Path, here: Path, serve: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM takes those that are not sent from the checkpoint's generation_config.json."""
    sampled_as, asked_with = sampler(model), list[dict[str, Any]]()

    def answer(payload: dict[str, Any]) -> Any:
        if is_strict and "top_k" in payload:
            return wire(b"unknown option top_k", "400 Bad Request")
        asked_with.append(payload)
        return sampled_as(payload)

    words = (
        "audit",
        "server",
        str(model),
        "--url",
        serve(answer),
        *PROMPTS,
        "--samples",
        "2",
        "--max-tokens",
        "4",
    )
    assert cli.main(words) in (1, 3)
    assert ("the server refuses options that are off" in capsys.readouterr().err) == is_strict
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert len(asked_with) > 2
    for payload in asked_with:
        assert {name: payload[name] for name in off if name in payload} == ({} if is_strict else off)

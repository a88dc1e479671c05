"""`tlt audit --url`: token ids from an OpenAI-compatible server, and servers that give none."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.unit.audit.test_command import run
from tests.unit.cli.parts import fail
from tlt.audit.known import Server, identify, known_fault
from tlt.audit.referee import Referee
from tlt.audit.server import read_token_ids


def test_token_ids_are_read_in_both_forms() -> None:
    assert read_token_ids({"token_ids": [1, 2]}) == [1, 2]
    assert read_token_ids({"logprobs": {"tokens": ["token_id:7", "token_id:8"]}}) == [7, 8]
    assert read_token_ids({"text": "x", "logprobs": None}) is None
    assert read_token_ids({"logprobs": {"tokens": ["a"]}}) is None


PROMPTS = ("--engine-model", "m", "--prompts", "prompts.jsonl")
ARGUMENTS = (*PROMPTS, "--samples", "25", "--max-tokens", "12")
Answer = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a completions endpoint that answers each payload by the function given, has these other
    pages, and asks for a key where one is given; returns its address."""
    servers = []

    def start(answer: Answer, pages: Mapping[str, str] = MappingProxyType({}), key: str = "") -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path in pages else 404)
                self.end_headers()
                self.wfile.write(pages.get(self.path, "").encode())

            def do_POST(self) -> None:
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body = json.dumps(answer(payload)).encode()
                status = 200 if self.path == "/v1/completions" else 404
                if key and (shown := self.headers["Authorization"]) != f"Bearer {key}":
                    status, body = 401, json.dumps({"error": f"not authorized by {shown}"}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        class Quick(http.server.ThreadingHTTPServer):
            request_queue_size = 128  # of connections not yet accepted; the default of 5 resets the others

        server = Quick(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


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


def sampler(model: Path, form: str, temperature: float = 1.0) -> Answer:
    """A server that samples the model."""
    referee_of(model)  # before threads ask for it at once

    def answer(payload: dict[str, Any]) -> dict[str, Any]:
        stop, prompt = frozenset(payload["stop_token_ids"]), tuple(payload["prompt"])
        tokens = sampled(model, temperature, prompt, stop, payload["max_tokens"], payload["seed"])
        choice: dict[str, Any] = {"finish_reason": "stop" if tokens[-1] in stop else "length"}
        if form == "token_ids" and payload.get("return_token_ids"):
            choice["token_ids"] = tokens
        if form == "logprobs" and payload.get("return_tokens_as_token_ids"):
            choice["logprobs"] = {"tokens": [f"token_id:{token}" for token in tokens]}
        return {"choices": [choice]}

    return answer


@pytest.mark.parametrize(
    ("form", "temperature", "expected"), [("token_ids", 1.0, 3), ("logprobs", 1.0, 3), ("token_ids", 0.5, 1)]
)
def test_a_server_is_judged(
    form: str,
    temperature: float,
    expected: int,
    model: Path,
    here: Path,
    serve: Callable[[Answer], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = serve(sampler(model, form, temperature))
    code, summary, _ = run(capsys, str(model), "--url", url, *ARGUMENTS)
    assert code == expected
    assert list(summary["modes"]) == [url]


DRAFTING = "vllm:spec_decode_num_drafts_total 7"


@pytest.mark.parametrize(
    ("temperature", "version", "metrics", "is_named"),
    [
        (0.5, "0.32.0", DRAFTING, True),
        (0.5, "0.32.0", "vllm:num_requests_running 0", False),  # it does not draft
        (0.5, "0.40.1", DRAFTING, False),
        (1.0, "0.32.0", DRAFTING, False),  # nothing is wrong
    ],
)
def test_the_bug_of_vllms_cpu_builds_is_named_where_a_drafting_server_fails(
    temperature: float,
    version: str,
    metrics: str,
    is_named: bool,
    model: Path,
    here: Path,
    serve: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pages = {"/version": json.dumps({"version": version}), "/metrics": metrics}
    url = serve(sampler(model, "token_ids", temperature), pages)
    code, _, output = run(capsys, str(model), "--url", url, *ARGUMENTS)
    assert code == (1 if temperature != 1.0 else 3)
    assert ("vllm issue 55005" in output and "not of vLLM on GPUs" in output) == is_named


@pytest.mark.parametrize("page", ["", "[]", "{}", '{"version": 3}'])
def test_a_server_that_does_not_say_what_it_is_has_no_known_fault(
    page: str, serve: Callable[..., str]
) -> None:
    assert identify(serve(lambda payload: {}, {"/version": page, "/metrics": DRAFTING})) is None


def test_greedy_decoding_does_not_have_the_bug() -> None:
    assert known_fault(Server("0.32.0", drafts=True), 1.0)
    assert known_fault(Server("0.32.0", drafts=True), 0.0) is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"text": "x"}]}, "returns no token ids"),
        ({"choices": []}, "answered without one choice"),
        ({}, "answered without one choice"),
    ],
)
def test_a_server_without_token_ids_is_one_line(
    answer: dict[str, Any],
    message: str,
    model: Path,
    here: Path,
    serve: Callable[[Answer], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = serve(lambda payload: answer)
    line = fail(capsys, "audit", str(model), "--url", url, *PROMPTS)
    assert message in line


def test_a_server_that_refuses_is_quoted(
    model: Path, here: Path, serve: Callable[[Answer], str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(lambda payload: {"error": "no such path"}) + "/v2"
    line = fail(capsys, "audit", str(model), "--url", url, *PROMPTS)
    assert "refuses (404" in line
    assert "no such path" in line


KEY = "a key of the server's"


def test_an_api_key_is_read_from_the_variable_that_is_named_and_written_nowhere(
    model: Path,
    here: Path,
    serve: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = serve(sampler(model, "token_ids", 1.0), key=KEY)
    monkeypatch.setenv("OF_THE_SERVER", f"{KEY}\n")
    words = [
        "--samples",
        "2",
        "--max-tokens",
        "4",
        "--api-key-variable",
        "OF_THE_SERVER",
        "--out",
        "report.json",
    ]
    code, _, said = run(capsys, str(model), "--url", url, *PROMPTS, *words)
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
    url = serve(sampler(model, "token_ids", 1.0), key=KEY)
    monkeypatch.setenv("WRONG", "another key")
    line = fail(capsys, "audit", str(model), "--url", url, *PROMPTS, *words)
    assert message in line
    assert "another key" not in line

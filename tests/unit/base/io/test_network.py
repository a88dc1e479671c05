"""Whether servers answer, asked of servers on loopback: one line each, and a time limit that holds."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from tlt.base.io.machine import Finding
from tlt.base.io.network import ask_servers


class Answering(BaseHTTPRequestHandler):
    """Answers with the status that the path begins with; the path of the hub's question ends with its own."""

    heard: ClassVar[list[tuple[str, str | None]]] = []

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        self.heard.append((self.path, self.headers.get("Authorization")))
        self.send_response(int(self.path.split("/")[1]))
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for variable in (
        "HF_TOKEN",
        "WANDB_MODE",
        "WANDB_BASE_URL",
        "TRACKIO_SERVER_URL",
        "HTTP_PROXY",
        "http_proxy",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "no token")
    Answering.heard.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    close_session()


def ask(monkeypatch: pytest.MonkeyPatch, hub: str, *trackers: str) -> list[Finding]:
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    found = list(ask_servers(trackers, seconds=0.2))
    assert not [one for one in found if "\n" in one.text + one.remedy]
    return found


def test_a_hub_that_answers_is_fine_with_and_without_a_token(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status in (401, 404):
        hub = f"{server}/{status}"
        assert ask(monkeypatch, hub) == [Finding("network", "ok", f"{hub} answers, no token")]
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert ask(monkeypatch, f"{server}/200")[0].text == f"{server}/200 answers, logged in"
    refused = ask(monkeypatch, f"{server}/401")[0]
    assert (refused.state, refused.text) == ("broken", f"{server}/401 refuses the token (401)")
    assert Answering.heard[1:3] == [("/404/api/whoami-v2", None), ("/200/api/whoami-v2", "Bearer hf_x")]


def test_refusals_no_answer_and_what_is_no_address_are_one_line_each(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for hub, part in (
            (f"{server}/407", "answers 407"),
            (f"{server}/503", "answers 503"),
            ("http://127.0.0.1:9", "cannot be reached (ConnectError: [Errno 111] Connection refused)"),
            (f"http://127.0.0.1:{silent.getsockname()[1]}", "cannot be reached (ReadTimeout: timed out)"),
            ("hub.example", "cannot be reached (UnsupportedProtocol"),
        ):
            (found,) = ask(monkeypatch, hub)
            assert (found.name, found.state) == ("network", "broken")
            assert found.text.startswith(f"{hub} {part}")
            assert found.remedy == "check the proxy (HTTPS_PROXY), or name another server in HF_ENDPOINT"


def test_the_servers_of_trackers_are_asked_without_the_hubs_token(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setenv("WANDB_BASE_URL", f"{server}/200")
    monkeypatch.setenv("TRACKIO_SERVER_URL", f"{server}/500")
    trackers = ("tensorboard", "wandb", "trackio", "mlflow")
    _, wandb, trackio = ask(monkeypatch, f"{server}/200", *trackers)
    assert wandb == Finding("network, wandb", "ok", f"{server}/200 answers")
    assert (trackio.name, trackio.state) == ("network, trackio", "broken")
    assert trackio.remedy.endswith("TRACKIO_SERVER_URL")
    assert Answering.heard[1:] == [("/200", None), ("/500", None)]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert [one.name for one in ask(monkeypatch, f"{server}/200", "wandb")] == ["network"]


def test_nothing_is_asked_where_the_hub_is_switched_off(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (found,) = ask(monkeypatch, f"{server}/200", "wandb")
    assert (found.state, Answering.heard) == ("note", [])

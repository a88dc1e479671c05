"""A tiny model in a folder, a folder with prompts for it, and servers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.unit.apps.cli.parts import WINDOW, save_tokenizer, write_lines
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.weights import save_model

Answer = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "model"
    config = ModelConfig("llama", 23, 16, 32, 2, 2, 1, 8, max_positions=WINDOW)
    tensors = Transformer(config).initialize(0, std=0.3).state_dict()
    save_model(path, config, tensors, dtype=torch.float32, source=None, extra={"eos_token_id": 1})
    save_tokenizer(path)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_lines("prompts.jsonl", {"prompt": "1+2="}, {"prompt_ids": [5, 6]})
    return tmp_path


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
                found = answer(payload)
                if isinstance(found, bytes):  # the whole answer, as it goes over the wire
                    self.wfile.write(found)
                    self.close_connection = True
                    return
                body = json.dumps(found).encode()
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

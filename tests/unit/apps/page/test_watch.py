"""The page is served to this machine alone, follows the run, and no file is reached by its name."""

import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.unit.apps.page.synthetic import make_run, step_record
from tlt.apps.page.watch import PageServer
from tlt.base.types import UserError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    folder = make_run(tmp_path / "run")
    server = PageServer([folder], 0, lambda stamp: f"<p>{stamp}</p>")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: PageServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_is_made_again_when_the_run_has_written_a_step(server: PageServer) -> None:
    status, first = ask(server, "/stamp")
    assert (status, ask(server, "/")) == (200, (200, f"<p>{first}</p>"))
    with (server.folders[0] / "metrics.jsonl").open("a") as file:
        file.write(step_record(7).to_json() + "\n")
    _, second = ask(server, "/stamp")
    assert second != first
    assert ask(server, "/") == (200, f"<p>{second}</p>")


def test_a_run_that_cannot_be_read_is_one_line_until_it_can(server: PageServer) -> None:
    def refuse(stamp: str) -> str:
        raise UserError("metrics.jsonl, line 3: no step record; repair or remove the line")

    make, server._make = server._make, refuse
    assert ask(server, "/") == (500, "metrics.jsonl, line 3: no step record; repair or remove the line")
    server._make = make
    assert ask(server, "/")[0] == 200


@pytest.mark.parametrize("path", ["/config.json", "/../config.json", "/%2e%2e/config.json", "/?a"])
def test_no_file_is_served(server: PageServer, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_it_listens_on_loopback_and_refuses_a_request_that_names_another_host(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/", "evil.example:80")[0] == 403
    assert ask(server, "/", f"localhost:{server.server_port}")[0] == 200

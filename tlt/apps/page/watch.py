"""Serves the page of a running run, on 127.0.0.1 alone.

/ is the page, made again when a file of the runs has changed; /stamp is its version. A request that names
another host is refused: no web page can read a run through the user's browser.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tlt.base.types import UserError

HOST = "127.0.0.1"
WATCHED = ("metrics.jsonl", "evaluations.jsonl", "failures.log")


def stamp_of(folders: Sequence[Path]) -> str:
    files = (folder / name for folder in folders for name in WATCHED)
    return "-".join(f"{file.stat().st_size}.{file.stat().st_mtime_ns}" for file in files if file.is_file())


class PageServer(ThreadingHTTPServer):
    """make: stamp → page."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int, make: Callable[[str], str]) -> None:
        super().__init__((HOST, port), _Handler)
        self.folders, self._make = folders, make
        self._lock, self._made = threading.Lock(), ("", "")

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def page(self) -> str:
        """Made once per version."""
        with self._lock:
            if (stamp := stamp_of(self.folders)) != self._made[0] or not self._made[1]:
                self._made = stamp, self._make(stamp)
            return self._made[1]


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10
    """Seconds of silence that end a connection."""

    def do_GET(self) -> None:
        hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Host") not in hosts:
            self.send_error(HTTPStatus.FORBIDDEN, "this page is served to its own machine alone")
        elif self.path == "/":
            try:
                self._send(self.server.page(), "text/html")
            except UserError as error:  # such as a damaged line; the next request tries again
                self._send(str(error), "text/plain", HTTPStatus.INTERNAL_SERVER_ERROR)
        elif self.path == "/stamp":
            self._send(stamp_of(self.server.folders), "text/plain")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        with contextlib.suppress(ConnectionError, TimeoutError):  # the browser has left, or reads nothing
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...

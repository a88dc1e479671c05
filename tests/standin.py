"""A stand-in for the Hugging Face hub on loopback: the part of its HTTP interface that huggingface_hub and
datasets ask for. It remembers what was asked, and can be told to cut a download off, to be slow or to
refuse."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """Files by path, at one commit. revisions: names of it.
    refusal: (status, X-Error-Code) where `token` is not given."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    refusal: tuple[int, str] | None = None
    token: str | None = None

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

    def knows(self, revision: str) -> bool:
        return revision in (*self.revisions, self.commit)


@dataclass
class Hub:
    """Repositories by (kind, name), kind being models or datasets.

    requests: (method, path, range) of all that was asked.
    cuts: how many of the next downloads of a file stop half way.
    seconds_per_kib: of every download.
    """

    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    cuts: dict[str, int] = field(default_factory=dict)
    seconds_per_kib: float = 0.0
    url: str = ""

    def add(self, name: str, files: Mapping[str, bytes] | Path, kind: str = "models", **options: Any) -> Repo:
        if isinstance(files, Path):
            files = {str(f.relative_to(files)): f.read_bytes() for f in files.rglob("*") if f.is_file()}
        self.repos[kind, name] = Repo(dict(files), **options)
        return self.repos[kind, name]

    @property
    def downloads(self) -> list[str]:
        """Names of the files whose bytes were asked for."""
        return [
            path.rpartition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        ]


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        served = hub

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is no news."""


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.requests.append((self.command, path, self.headers.get("Range")))
        parts = path.strip("/").split("/")
        if parts[0] == "api" and len(parts) >= 4 and (parts[1], "/".join(parts[2:4])) in self.served.repos:
            self.api(self.served.repos[parts[1], "/".join(parts[2:4])], "/".join(parts[2:4]), parts[4:])
        elif "resolve" in parts:
            kind = "datasets" if parts[0] == "datasets" else "models"
            at = parts.index("resolve")
            repo = self.served.repos.get((kind, "/".join(parts[at - 2 : at])))
            self.file(repo, parts[at + 1], "/".join(parts[at + 2 :]))
        else:
            self.refuse(404, "RepoNotFound")

    def is_refused(self, repo: Repo) -> bool:
        if repo.refusal is None or (
            repo.token and self.headers.get("Authorization") == f"Bearer {repo.token}"
        ):
            return False
        self.refuse(*repo.refusal)
        return True

    def api(self, repo: Repo, name: str, rest: list[str]) -> None:
        if self.is_refused(repo):
            return
        action, revision = (rest[0], rest[1]) if len(rest) > 1 else ("revision", "main")
        if not repo.knows(revision):
            self.refuse(404, "RevisionNotFound")
        elif action == "revision":
            siblings = [{"rfilename": path} for path in repo.files]
            info = {
                "id": name,
                "sha": repo.commit,
                "siblings": siblings,
                "private": False,
                "gated": False,
                "tags": [],
            }
            counted = {
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "lastModified": "2026-01-01T00:00:00.000Z",
            }
            self.send_json(info | counted)
        elif action == "tree":
            is_recursive = (
                "recursive=True" in urlsplit(self.path).query or "recursive=true" in urlsplit(self.path).query
            )
            self.send_json(_tree(repo.files, "/".join(rest[2:]), is_recursive))
        elif action == "paths-info":
            wanted = json.loads(self.body)["paths"]
            self.send_json([_entry(path, repo.files[path]) for path in wanted if path in repo.files])
        else:
            self.refuse(404, "")

    def file(self, repo: Repo | None, revision: str, path: str) -> None:
        if repo is None:
            self.refuse(404, "RepoNotFound")
        elif self.is_refused(repo):
            return
        elif not repo.knows(revision):
            self.refuse(404, "RevisionNotFound")
        elif path not in repo.files:
            self.refuse(404, "EntryNotFound", {"X-Repo-Commit": repo.commit})
        else:
            self.send_bytes(path, repo)

    def send_bytes(self, path: str, repo: Repo) -> None:
        data = repo.files[path]
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        digest = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        headers |= {"X-Linked-Size": str(len(data)), "Content-Length": str(len(data) - start)}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        data = data[start:]
        if is_cut := self.served.cuts.get(path, 0) > 0:
            self.served.cuts[path] -= 1
            data = data[: len(data) // 2]
        for begin in range(0, len(data), 1024):
            self.wfile.write(data[begin : begin + 1024])
            if self.served.seconds_per_kib:
                time.sleep(self.served.seconds_per_kib)
        self.wfile.flush()
        self.close_connection = is_cut

    def send_json(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def refuse(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"X-Error-Code": code, "Content-Length": "0", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()


def _tree(files: Mapping[str, bytes], folder: str, is_recursive: bool) -> list[dict[str, object]]:
    prefix = f"{folder}/" if folder else ""
    inside = {path: data for path, data in files.items() if path.startswith(prefix)}
    if is_recursive:
        return [_entry(path, data) for path, data in inside.items()]
    folders = {
        prefix + path.removeprefix(prefix).split("/")[0]
        for path in inside
        if "/" in path.removeprefix(prefix)
    }
    directories: list[dict[str, object]] = [
        {"type": "directory", "path": p, "size": 0, "oid": "0" * 40} for p in sorted(folders)
    ]
    return directories + [
        _entry(path, data) for path, data in inside.items() if "/" not in path.removeprefix(prefix)
    ]


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "path": path,
        "size": len(data),
        "oid": hashlib.sha1(data).hexdigest(),
    }
    if path.endswith((".safetensors", ".parquet")):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry

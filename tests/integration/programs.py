"""`python -m MODULE …` as a process forked from one that has imported what a run needs: of a small run most
is importing.

    a test ── words, environment, stdout and stderr ─▶ the server, which imports once
           ◀─ process id, and in the end the status ──   └─ fork ─▶ a session of its own, which runs the module as __main__

A program ends as Python does, with all that is done at its exit. What its start does is looked at where it
is not forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tlt.models.hf.tokenizer import load_tokenizer
from tlt.speculation.law import compiled

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "torch._dynamo",
    "tlt.apps.cli.commands",
    "tlt.training.ranks.world",
    "tlt.training.run",
)
"""Whatever else a run imports comes with these."""
LONGEST = 1 << 20
"""Bytes of a message: words and an environment."""


class Programs:
    """The test's side. One program runs at a time."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        with theirs:
            words = [sys.executable, "-m", "tests.integration.programs", str(theirs.fileno())]
            self._server = subprocess.Popen(
                words, env=environment, pass_fds=[theirs.fileno()], start_new_session=True
            )

    def close(self) -> None:
        """Ends the server, which ends where nobody is left to ask it."""
        self._control.close()
        assert self._server.wait(timeout=60) == 0

    def begin(
        self, words: Sequence[str], env: Mapping[str, str], output: Sequence[int], forks: bool = True
    ) -> int:
        """Starts `python -m MODULE …`; returns its process id, which is its group's, too. output: files, or
        pipes, for stdout and stderr.
        forks: a launcher's ranks are forked from it; a user's import what they need."""
        assert list(words[:2]) == [sys.executable, "-m"], words
        about = {"words": list(words[2:]), "environment": dict(env), "folder": os.getcwd(), "forks": forks}
        socket.send_fds(self._control, [json.dumps(about).encode()], output)
        return self._hear("process")

    def wait(self, timeout: float) -> int:
        """Returns the exit code of the program that runs; negative: the signal that has killed it."""
        self._control.settimeout(timeout)
        return os.waitstatus_to_exitcode(self._hear("status"))

    def run(
        self, words: Sequence[str], *, env: Mapping[str, str], timeout: float, forks: bool = True, **_: Any
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run(capture_output=True, text=True, check=False) does; what is late is killed,
        with its group."""
        (stdout, *theirs), (stderr, *others) = os.pipe(), os.pipe()
        process = self.begin(words, env, (*theirs, *others), forks)
        for end in (*theirs, *others):
            os.close(end)
        with ThreadPoolExecutor(2) as readers:
            texts, code = [readers.submit(_read, pipe) for pipe in (stdout, stderr)], None
            try:
                code = self.wait(timeout)
                said = [text.result(timeout) for text in texts]  # until nobody is left who could write
            except TimeoutError as late:
                os.killpg(process, signal.SIGKILL)
                if code is None:
                    self.wait(timeout)
                raise subprocess.TimeoutExpired(words, timeout) from late
        return subprocess.CompletedProcess(words, code, *said)

    def _hear(self, what: str) -> int:
        """Passes over the status of a program for which nobody has waited."""
        while message := self._control.recv(LONGEST):
            if what in (said := json.loads(message)):
                return int(said[what])
        raise AssertionError("the server is gone")


def _read(pipe: int) -> str:
    with open(pipe) as text:
        return text.read()


# ── the server's side ───────────────────────────────────────────────────────────────────────────────────────


def serve(control: socket.socket) -> None:
    _import_what_runs_need()
    while True:
        message, files, *_ = socket.recv_fds(control, LONGEST, 2)
        if not message:
            return
        if (process := os.fork()) == 0:
            control.close()
            _become(files, **json.loads(message))
        for file in files:
            os.close(file)
        control.send(json.dumps({"process": process}).encode())
        control.send(json.dumps({"status": os.waitpid(process, 0)[1]}).encode())


def _import_what_runs_need() -> None:
    """Without starting a thread, which no fork would have. What is imported is no garbage: no program
    looks for any in it."""
    for name in IMPORTED:
        importlib.import_module(name)
    load_tokenizer(ROOT / "recipes" / "countdown" / "base")
    compiled.load()
    gc.collect()
    gc.freeze()


def _become(
    files: Sequence[int], words: Sequence[str], environment: Mapping[str, str], folder: str, forks: bool
) -> None:
    """Runs the module in this process, which ends with it."""
    os.setsid()
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv[1:] = words[1:]
    if forks:
        from tests.faults.victim import fork_ranks

        fork_ranks()
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

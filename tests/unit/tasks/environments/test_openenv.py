"""Environments behind a server of OpenEnv: sessions that last for one question."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tests.unit.tasks.environments.played import begin, environments, library, reward, say

CLIENT = "openenv:Client"
NUMBER = random.Random(3).randint(1, 20)


@pytest.fixture(params=["stand-in", "library"])
def row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    columns = {"problem_id": "1", "action": "message", "observation": "text", "seed": 3}
    with library("openenv", request.param == "stand-in", monkeypatch), socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        served = {**columns, "base_url": f"http://127.0.0.1:{port}"}
        if request.param == "stand-in":
            yield served
            return
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("guess_server.py")), str(port)]
        )
        try:
            _wait_for(port)
            yield served
        finally:
            server.terminate()
            server.wait(30)


def _wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError("the server does not listen")


def test_a_game_is_played_to_its_end_by_one_session_at_a_time(row: dict[str, Any]) -> None:
    first, second = environments(CLIENT), environments(CLIENT)
    assert begin(first, row) == f"Guess the number: {NUMBER % 2}."
    assert begin(second, row)  # the server has one session, which has ended
    low = say(first, row, "<think>9</think>0", "")
    assert low.text == "higher"
    high = say(second, row, "21", low.state)
    assert high.text == "lower"
    assert reward(first, row, high.state) == pytest.approx(-0.2)
    last = say(first, row, str(NUMBER), high.state)
    assert last.text is None
    assert reward(second, row, last.state) == pytest.approx(0.8)


def test_an_environment_that_forgets_its_seed_is_refused(row: dict[str, Any]) -> None:
    with refused("answers otherwise when it is told the same again"):
        say(environments(CLIENT), {**row, "seed": None}, "0", "")


def test_an_unknown_field_is_told_with_those_that_exist(row: dict[str, Any]) -> None:
    with refused("column observation is 'prompt'; http://.* gives .*text"):
        begin(environments(CLIENT), {**row, "observation": "prompt"})


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    with refused(r"environment: no module 'openenv.*'; pip install "):
        environments(CLIENT)

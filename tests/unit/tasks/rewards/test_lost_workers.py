"""Reward workers that are killed, stop, or say what nobody has asked for: the response is tried again, for
the same reward."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tasks.rewards.parts import is_running, score_texts, wait_until
from tlt.base.io.processes import how_it_ended
from tlt.base.types import Reward
from tlt.tasks.rewards.pool import RewardPool
from tlt.tasks.rewards.scoring import RewardSpec

TASK = '''
import asyncio, os, signal, socket, sys, threading, time
from multiprocessing.connection import Connection
from pathlib import Path
from tlt.tasks.workers import Answered
from tlt.base.types import Reward

HERE = Path(__file__).parent

def is_first(name):
    """Whether no process has asked so before."""
    try:
        (HERE / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def pipe():
    return int(sys.argv[1])

def raise_(error):
    raise error

def hang():
    while True:
        time.sleep(1)

def forge(seconds):
    """Sends in another's name what looks like an answer to the first response."""
    time.sleep(seconds)
    Connection(os.dup(pipe())).send(Answered(1, [Reward(-500.0, False)]))

def hang_up():
    with socket.socket(fileno=os.dup(pipe())) as end:
        end.shutdown(socket.SHUT_RDWR)

DEEDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "die": lambda: os._exit(3),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hang,
    "rubbish": lambda: os.write(pipe(), b"\\0\\0\\0\\x05hello"),
    "half": lambda: os.write(pipe(), b"hello"),  # says that 1.7 GB follow
    "forge": lambda: forge(0),
    "forge-later": lambda: threading.Thread(target=forge, args=(0.2,)).start(),
    "hang-up": hang_up,
    "close": lambda: (os.close(pipe()), hang()),
    "interrupt": lambda: raise_(KeyboardInterrupt("enough")),
    "generator": lambda: raise_(GeneratorExit("enough")),
    "exit": lambda: raise_(SystemExit("enough")),
    "cancel": lambda: raise_(asyncio.CancelledError("enough")),
}

class Task:
    def problems(self, num, seed, **options):
        return []

    def warm_up(self, options):
        for name, deed in options.items():
            if name == "always" or is_first("start"):
                DEEDS[deed]()

    def score(self, problem, text):
        verb, _, how = text.partition(" ")
        if verb == "fork":
            is_child = os.fork() == 0
            if is_child == (how == "late"):
                time.sleep(0.2)
            if is_child:
                return {"reward": -500.0, "solved": False}
        if verb == "sleep":
            time.sleep(float(how))
        if verb == "kill-others" and os.getpid() != int(how) and is_first(verb):
            DEEDS["kill"]()
        if verb == "pid":
            return {"reward": os.getpid(), "solved": False}
        if verb in DEEDS and (how != "once" or is_first(verb)):
            DEEDS[verb]()
        return {"reward": problem["worth"], "solved": True}

TASK = Task()

def do(completions, **columns):
    DEEDS[completions[0]]()

async def do_later(completions, **columns):
    DEEDS[completions[0]]()
'''


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "lost_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tlt.base.io.processes.MESSAGE_SECONDS", 1, raising=False)
    monkeypatch.setattr("tlt.tasks.workers.EXIT_SECONDS", 1.0, raising=False)
    yield tmp_path
    sys.modules.pop("lost_task", None)


def rewards_of(
    texts: list[str], num_workers: int = 1, timeout: float = 60, **options: str
) -> dict[str, Reward]:
    """Returns text → reward; the i-th response is worth i."""
    spec = RewardSpec("lost_task:TASK", options=options)
    return dict(zip(texts, score_texts(spec, texts, num_workers, timeout), strict=True))


def scored(texts: list[str]) -> dict[str, Reward]:
    return {text: Reward(float(i), True) for i, text in enumerate(texts)}


LOST = ["kill", "die", "stop", "hang", "rubbish", "half", "forge", "hang-up", "close"]


def test_a_response_whose_worker_is_lost_once_gets_the_reward_that_it_would_have_got(
    capfd: pytest.CaptureFixture[str],
) -> None:
    texts = [f"{how} once" for how in LOST]
    assert rewards_of(texts, num_workers=4, timeout=1) == scored(texts)
    assert capfd.readouterr() == ("", ""), "nothing that workers print"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("kill", "the worker died: killed by SIGKILL (out of memory?)"),
        ("rubbish", "the worker's pipe brought what is no answer to the request"),
    ],
)
def test_the_second_loss_is_the_responses_own_and_says_so(how: str, reason: str) -> None:
    assert rewards_of([how, "fine"]) == {
        how: Reward(0.0, False, f"{reason}; tried twice"),
        "fine": Reward(1.0, True),
    }


def test_a_worker_killed_at_its_start_costs_no_response_its_score() -> None:
    assert rewards_of(["fine"], once="kill") == scored(["fine"])


def test_workers_that_all_die_at_their_start_are_given_up_and_the_response_says_why() -> None:
    reason = "the worker died: exit code 3; the last of 3 workers lost before they took it up"
    assert rewards_of(["fine"], always="die") == {"fine": Reward(0.0, False, reason)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_lost_while_idle_costs_the_next_response_neither_its_score_nor_its_second_try(
    number: int,
) -> None:
    timeout = 60 if number == signal.SIGKILL else 1
    with RewardPool(RewardSpec("lost_task:TASK"), 1, timeout) as pool:
        pool.submit(("a", 0), {}, "pid")
        pid = int(pool.drain()["a", 0].value)
        os.kill(pid, number)
        wait_until(lambda: number == signal.SIGSTOP or not is_running(pid))
        large = {"worth": 2.0, "more": "x" * 1_000_000}  # more than a pipe holds that nobody reads
        pool.submit(("b", 0), large, "kill once" if number == signal.SIGKILL else "fine")
        assert pool.drain(patience=60) == {("b", 0): Reward(2.0, True)}


def test_a_signal_that_asks_to_stop_reaches_no_score() -> None:
    """As batch systems send them to all processes of a job; the run decides when its workers end."""
    with RewardPool(RewardSpec("lost_task:TASK"), 1, timeout_seconds=60) as pool:
        pool.submit(("a", 0), {}, "pid")
        pid = int(pool.drain()["a", 0].value)
        pool.submit(("b", 0), {"worth": 2.0}, "sleep 0.5")
        time.sleep(0.1)
        os.kill(pid, signal.SIGINT)
        assert pool.drain(patience=60) == {("b", 0): Reward(2.0, True)}


def test_a_forked_child_that_returns_answers_for_nobody() -> None:
    texts = ["fork late", "sleep 0.4", "fork first", "fine"]
    assert rewards_of(texts) == scored(texts)


def test_an_answer_that_comes_late_is_taken_for_no_other_response() -> None:
    texts = ["forge-later", "sleep 0.5", "fine"]
    assert rewards_of(texts) == scored(texts)


def test_an_answer_that_comes_while_nobody_asks_does_not_cost_the_next_response_its_second_try() -> None:
    with RewardPool(RewardSpec("lost_task:TASK"), 1, timeout_seconds=60) as pool:
        pool.submit(("a", 0), {}, "pid")
        pid = int(pool.drain(patience=60)["a", 0].value)
        pool.submit(("b", 0), {"worth": 1.0}, "forge-later")
        pool.drain(patience=60)
        (worker,) = pool._crew._workers
        assert worker.pipe.poll(60)
        pool.submit(("c", 0), {"worth": 2.0}, f"kill-others {pid}")
        assert pool.drain(patience=60) == {("c", 0): Reward(2.0, True)}


@pytest.mark.parametrize(
    "functions", [(), ("lost_task:do",), ("lost_task:do_later",)], ids=["task", "function", "coroutine"]
)
def test_whatever_a_score_raises_is_one_line_and_costs_no_worker(
    functions: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    verbs = {"interrupt": "KeyboardInterrupt", "generator": "GeneratorExit", "cancel": "CancelledError"}
    verbs["exit"] = "SystemExit"
    with RewardPool(RewardSpec("lost_task:TASK", functions), 1, timeout_seconds=20) as pool:
        for verb in verbs:
            pool.submit((verb, 0), {"worth": 1.0}, verb)
            pool.complete([(verb, 0)])
        found = {verb: reward.error for (verb, _), reward in pool.drain(patience=60).items()}
        assert len(pool._crew._workers) == 1, "the one that it began with"
    for verb, name in verbs.items():
        assert f"{name}: enough, " in found[verb]
        assert "\n" not in found[verb]
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_while_a_rank_scores_itself_is_no_verdict() -> None:
    with (
        RewardPool(RewardSpec("lost_task:TASK"), 0, timeout_seconds=60) as pool,
        pytest.raises(KeyboardInterrupt),
    ):
        pool.submit(("a", 0), {"worth": 1.0}, "interrupt")


def test_an_exit_code_that_nobody_knows_is_not_called_none() -> None:
    assert how_it_ended(None) == "exit code unknown"

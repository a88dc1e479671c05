"""Rewards from worker processes: right, with the reason where there is none, bounded in time, and nothing
left behind."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.refused import refused
from tests.unit.tasks.rewards.parts import children, is_running, score_texts, wait_for_files, wait_until
from tlt.base.types import Reward, UserError
from tlt.tasks.rewards.pool import RewardPool, RewardSummary, check_scorable, describe_constant, summarize
from tlt.tasks.rewards.scoring import RewardSpec

TASK = '''
import os, resource, signal, sys, time

class FaultyTask:
    """Does what the response says."""

    def problems(self, num, seed, **options):
        return []

    def score(self, problem, response_text):
        verb, _, value = response_text.partition(" ")
        if verb == "raise":
            raise RuntimeError("no such luck")
        if verb in ("hang", "await") and value:
            open(f"{value}.{os.getpid()}", "w").close()  # it has begun
        if verb == "hang":
            while True:
                pass
        if verb == "sleep":
            time.sleep(float(value))
        if verb == "await":
            while not os.path.exists(value):
                time.sleep(0.01)
        if verb == "die":
            os._exit(3)
        if verb == "exit":
            sys.exit(4)
        if verb == "allocate":
            resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
            bytearray(2**33)
        if verb == "kernel":  # what it does where the machine's memory is spent
            os.kill(os.getpid(), signal.SIGKILL)
        if verb == "score":
            return {"reward": float(open("/proc/self/oom_score_adj").read()), "solved": False}
        if verb == "modules":
            return {"reward": float(any(name in sys.modules for name in value.split(","))), "solved": False}
        if verb == "mask":
            return {"reward": float(len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))), "solved": False}
        if verb == "nan":
            return {"reward": float("nan"), "solved": False}
        if verb == "print":
            print(response_text, flush=True)
        if verb == "lines":
            raise RuntimeError("one\\ntwo")
        if verb == "incomplete":
            return {"reward": 1.0}
        return {"reward": problem["worth"], "solved": True}

TASK = FaultyTask()
'''


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "faulty_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    yield "faulty_task:TASK"
    sys.modules.pop("faulty_task", None)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_response_gets_its_own_reward_or_the_reason_why_it_has_none(
    task: str, num_workers: int, tmp_path: Path
) -> None:
    found = {
        "raise": f"RuntimeError: no such luck, {tmp_path}/faulty_task.py:13",
        "nan": "the reward is nan; it must be a finite number",
        "incomplete": "score() returned {'reward': 1.0}; it must be "
        '{"reward": a number, "solved": whether it is right}',
        "exit": f"SystemExit: 4, {tmp_path}/faulty_task.py:27",
        "lines": f"RuntimeError: one two, {tmp_path}/faulty_task.py:44",
    }
    rewards = score_texts(RewardSpec(task), [*["fine"] * 20, *found], num_workers)
    assert rewards[:20] == [Reward(float(i), True) for i in range(20)]
    assert [(reward.value, reward.error) for reward in rewards[20:]] == [(0.0, why) for why in found.values()]


def test_a_scorer_that_allocates_too_much_costs_its_own_response_and_goes_before_the_run(task: str) -> None:
    allocated, killed, score = score_texts(RewardSpec(task), ["allocate", "kernel", "score"])
    assert allocated.error.startswith("MemoryError")
    assert killed == Reward(0.0, False, "the worker died: killed by SIGKILL (out of memory?); tried twice")
    assert score == Reward(1000.0, False), "the kernel ends this process first"


def test_of_many_responses_with_every_fault_none_is_lost_and_each_gets_its_own_verdict(task: str) -> None:
    expected = {
        "fine": "",
        "raise": "RuntimeError: no such luck",
        "hang": "time-out: not scored within",
        "nan": "the reward is nan",
        "die": "the worker died",
    }
    texts = [*list(expected)[1:] * 2, *["fine"] * 120]
    random.Random(1).shuffle(texts)
    found = score_texts(RewardSpec(task), texts, 4, timeout=1.0)
    for i, (text, reward) in enumerate(zip(texts, found, strict=True)):
        assert expected[text] in reward.error, (text, reward)
        assert (reward.is_scored, reward.value) == ((True, float(i)) if text == "fine" else (False, 0.0))
    assert summarize(found).num_errors == 8


def test_a_task_that_cannot_be_imported_in_a_worker_says_why(task: str, tmp_path: Path) -> None:
    """The parent has imported it already; in the worker's fresh interpreter something is missing."""
    with RewardPool(RewardSpec(task), 1, timeout_seconds=30) as pool:
        pool.submit(("before", 0), {"worth": 1.0}, "fine")
        assert pool.drain()["before", 0].is_scored
        (tmp_path / "faulty_task.py").write_text("import no_such_module")
        pool.submit(("last", 0), {}, "die")
        pool.submit(("after", 0), {"worth": 1.0}, "fine")
        error = pool.drain()["after", 0].error
    assert error.startswith("the worker could not start: ")
    assert "no_such_module" in error


def test_a_worker_that_cannot_be_started_again_blocks_nobody(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with RewardPool(RewardSpec(task), 1, timeout_seconds=30) as pool:
        pool.submit(("before", 0), {"worth": 1.0}, "fine")
        pool.drain()
        with monkeypatch.context() as patch:
            patch.setattr("tlt.base.io.processes.subprocess.Popen", refuse)
            pool.submit(("dead", 0), {}, "die")
            for i in range(3):
                pool.submit(("p", i), {"worth": 1.0}, "fine")
            rewards = pool.drain(patience=60)
        why = "no worker could be started: [Errno 12] Cannot allocate memory"
        assert [rewards["p", i].error for i in range(3)] == [why] * 3
        pool.submit(("after", 0), {"worth": 1.0}, "fine")
        assert pool.drain() == {("after", 0): Reward(1.0, True)}


def test_a_backlog_beyond_all_patience_names_the_task_and_who_is_scored(task: str) -> None:
    with RewardPool(RewardSpec(task), 1, timeout_seconds=60) as pool:
        for i in range(5):
            pool.submit((f"p{i}", 0), {"worth": 1.0}, "sleep 30")
        with pytest.raises(UserError) as caught:
            pool.drain(patience=0.5)
    message = str(caught.value)
    assert all(part in message for part in ("faulty_task:TASK", "5 responses", "p0", "rewards.num_workers"))
    assert "\n" not in message


def test_a_worker_hears_signals_even_where_its_parent_blocks_them(task: str) -> None:
    """A rank has them blocked; what a task starts must not inherit that."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        assert score_texts(RewardSpec(task), ["mask"]) == [Reward(0.0, False)]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def test_what_a_scorer_prints_changes_no_reward_where_nobody_can_read_it(task: str) -> None:
    stdout = os.dup(1)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        os.dup2(full, 1)
        results = score_texts(RewardSpec(task), ["fine", "print something"])
    finally:
        os.dup2(stdout, 1)
        os.close(full)
        os.close(stdout)
    assert results == [Reward(0.0, True), Reward(1.0, True)]


def test_means_are_over_the_responses_that_could_be_scored() -> None:
    failed = [Reward(0.0, False, why) for why in ("time-out", "KeyError")]
    rewards = [Reward(1.0, True), failed[0], Reward(0.5, False), failed[1]]
    expected = RewardSummary(mean=0.75, solve_rate=0.5, num_errors=2, first_error="time-out", std=0.25)
    assert summarize(rewards) == expected
    none_scored = summarize(rewards[1:2])
    assert math.isnan(none_scored.mean)
    assert math.isnan(none_scored.std)
    assert math.isnan(none_scored.solve_rate)


def test_a_function_that_gives_all_responses_the_same_is_named_as_one_that_compares_a_group_would_be() -> (
    None
):
    def step(*relative: float | None) -> list[Reward]:
        parts = [
            {} if value is None else {"relative": value, "task": 0.0, "n": float(i)}
            for i, value in enumerate(relative)
        ]
        return [Reward(0.0, False, parts=one) for one in parts]

    (line,) = describe_constant(step(0.0, 0.0, 0.0), "step 1")
    assert line.startswith("rewards.functions: relative gives 0 to all 3 responses of step 1, so nothing is")
    unsure = (step(0.0), step(0.0, 0.5), step(0.0, None), [Reward(0.0, False, "lost")] * 2, [])
    assert [describe_constant(rewards, "step 1") for rewards in unsure] == [[]] * 5


def test_a_step_without_any_score_is_the_users_mistake_and_says_the_first_error() -> None:
    failed = [Reward(0.0, False, "KeyError: 'target'"), Reward(0.0, False, "time-out")]
    with refused(r"^task mine: .*KeyError: 'target'.*"):
        check_scorable(failed, "mine", "step 1")
    check_scorable([*failed, Reward(0.0, False)], "mine", "step 1")


def test_workers_import_nothing_heavy(task: str) -> None:
    heavy = "modules torch,numpy,pytest,transformers,pydantic"
    assert score_texts(RewardSpec(task), [heavy]) == [Reward(0.0, False)]


def test_after_close_no_worker_is_left_not_even_a_hung_one(task: str) -> None:
    before = children()
    pool = RewardPool(RewardSpec(task), 2, timeout_seconds=300)
    pool.submit(("fine", 0), {"worth": 1.0}, "fine")
    pool.drain()
    pool.submit(("hung", 0), {}, "hang")
    wait_until(lambda: len(children() - before) == 2)
    time.sleep(0.2)  # into the hang
    workers = children() - before
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers), "no zombie, either"
    pool.close()


def test_what_was_abandoned_is_never_returned_and_its_key_is_free_again(task: str, tmp_path: Path) -> None:
    with RewardPool(RewardSpec(task), 1, timeout_seconds=60) as pool:
        pool.submit(("a", 0), {"worth": 1.0}, f"await {tmp_path / 'signal'}")
        pool.submit(("b", 0), {"worth": 1.0}, "fine")
        wait_for_files(tmp_path, "signal.*", 1)
        pool.abandon()
        pool.submit(("a", 0), {"worth": 2.0}, "fine")
        (tmp_path / "signal").touch()
        assert pool.drain() == {("a", 0): Reward(2.0, True)}


def test_an_unknown_task_is_refused_when_the_pool_is_made() -> None:
    with pytest.raises(ValueError, match="unknown task 'countdwon'"):
        RewardPool(RewardSpec("countdwon"), 1, 1.0)


SCRIPT = """
import os, signal, sys, time
from tlt.tasks.rewards.pool import RewardPool
from tlt.tasks.rewards.scoring import RewardSpec
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
pool = RewardPool(RewardSpec("faulty_task:TASK"), 2, 300)
try:
    for i in range(4):
        pool.submit(("p", i), {"worth": 1.0}, sys.argv[1])
    while len(pool._crew._workers) < 2:
        time.sleep(0.01)
    print("ready", flush=True)
    while True:  # one long sleep could begin just after the signal, and would not be interrupted
        time.sleep(0.02)
except KeyboardInterrupt:
    pool.close()
    print("closed", flush=True)
"""


@pytest.fixture
def start(task: str, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a parent whose responses all have one text. It has no `if __name__ == "__main__"`: workers that
    imported it again would make pools of their own."""
    (tmp_path / "main.py").write_text(SCRIPT)
    started = []

    def start(response: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[4])])
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, str(tmp_path / "main.py"), response]
        pipe = subprocess.PIPE
        parent = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environment
        )
        started.append(parent)
        return parent

    yield start
    for parent in started:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        for stream in (parent.stdout, parent.stderr):
            assert stream is not None
            stream.close()


@pytest.mark.parametrize("delay", [0.0, 1.0])  # while workers start; while they work
def test_ctrl_c_in_the_process_group_prints_nothing_from_workers(
    start: Callable[[str], subprocess.Popen[str]], delay: float
) -> None:
    parent = start("sleep 60")
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    time.sleep(delay)
    os.killpg(parent.pid, signal.SIGINT)
    stdout, stderr = parent.communicate(timeout=30)
    assert (stdout, stderr, parent.returncode) == ("closed\n", "", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_killed_parent_leaves_no_hung_worker_behind(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    parent = start(f"hang {tmp_path / 'begun'}")
    workers = [int(path.suffix[1:]) for path in wait_for_files(tmp_path, "begun.*", 2)]
    assert all(is_running(pid) for pid in workers)
    parent.kill()
    parent.wait()
    try:
        wait_until(lambda: not any(map(is_running, workers)))
    finally:
        for pid in filter(is_running, workers):
            os.kill(pid, signal.SIGKILL)

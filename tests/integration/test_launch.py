"""Starting and ending ranks for real: processes, signals to the group and to the parent, failures,
collectives.

Each scenario is one `launch` in a session of its own, as a terminal would have it. What takes the time is
importing torch: so the launching processes are forked from one that has done it, several run at once, and
ranks are forked as well where their own start is not what is looked at.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROGRAM = '''
import json, os, socket, sys, time
from pathlib import Path
from tlt.training.launch.failures import Restarts
from tlt.training.launch.local import launch


def say(**what):
    line = json.dumps({"rank": int(os.environ.get("RANK", 0)), **what}) + "\\n"
    os.write(1, line.encode())  # one call: lines of several ranks do not mix


def listens_at(pid):
    """The addresses, as the kernel writes them, at which a process takes connections."""
    sockets, found = set(), set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for words in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].partition(":")[0])
    return sorted(found)


if __name__ == "__mp_main__" and "IMPORTS_UNTIL_ORPHANED" in os.environ:
    launcher = os.getppid()
    say(importing=True)
    while os.getppid() == launcher:
        time.sleep(0.02)


def is_free(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def entry(scenario, stop):
    import torch
    from tlt.training.ranks.world import (
        any_rank, average_weighted, broadcast_json, gather_objects, init_process_group_from_env, refuse_together, shutdown)
    from tlt.base.types import UserError

    if scenario == "collectives" and os.environ["RANK"] == "0":
        say(is_free=is_free(int(os.environ["MASTER_PORT"])))
    world = init_process_group_from_env("cpu", timeout_seconds=60)
    rank = world.rank
    gather_objects(world, "all here")
    say(ready=True, pid=os.getpid())
    latest = time.monotonic() + 300  # whatever becomes of the test, no process stays
    if scenario == "collectives":
        from tlt.training.rollout.work_queue import connect_work_queue
        from tlt.training.report.timeline import shared_epoch

        def average(weights, dtype=torch.float32, fill=None):
            tensors = [torch.full((2, 3), float(rank + 1), dtype=dtype), torch.arange(4, dtype=dtype) * (rank + 1) / 7]
            if fill is not None and weights[rank] == 0:
                tensors[0].fill_(fill)
            before = [tensor.clone() for tensor in tensors]
            total = average_weighted(world, tensors, weights[rank])
            return total, [t.flatten().tolist() for t in tensors], [t.flatten().tolist() for t in before]

        say(gathered=gather_objects(world, {"rank": rank}), threads=torch.get_num_threads())
        say(any=any_rank(world, rank == 1), none=any_rank(world, False))
        say(told=[broadcast_json(world, value) for value in ({"rank": rank, "pi": 0.1 + 0.2}, None, [])])
        try:
            refuse_together(world, None)
            refuse_together(world, f"mistake {rank}" if rank == 1 else None)
        except UserError as mistake:
            say(refused=str(mistake))
        say(weighted=average((1.0, 3.0)), unweighted=average((0, 0)), alone=average((0, 5.0), fill=float("nan")))
        say(bf16=average((1.0, 1.0), torch.bfloat16), double=average((1.0, 1.0), torch.float64))
        say(nothing=average_weighted(world, [], 2.0), listens=listens_at(os.getpid()), launcher=listens_at(os.getppid()))
        queue = connect_work_queue(world.store, rank, world.world_size, timeout=30.0)
        queue.begin("rollout 0", 100)
        taken = []
        while not queue.all_done():
            for unit in queue.take(4):
                taken.append(unit)
                queue.finish(unit)
        epoch = shared_epoch(rank, lambda value: gather_objects(world, value))
        say(taken=taken, epoch=epoch.to_unix - (time.time() - time.perf_counter()))
        del queue
    elif scenario == "loop":
        while not stop.is_set() and time.monotonic() < latest:
            time.sleep(0.02)
        time.sleep(0.3)
        say(finished=gather_objects(world, rank))
    elif scenario == "agree":
        while not any_rank(world, stop.is_set()) and time.monotonic() < latest:
            time.sleep(0.02)
        say(finished=gather_objects(world, rank))
    elif scenario == "deaf":
        while time.monotonic() < latest:
            time.sleep(0.1)
    elif scenario == "awaited":
        from tlt.training.ranks.waiting import RankAwaited

        while rank == 1 or not stop.is_set():
            time.sleep(0.02)
            assert time.monotonic() < latest
        raise RankAwaited("rank 0 has waited 60 s (run.timeout_seconds) in a collective for rank 1")
    elif scenario == "stranger":
        from torch.distributed import PrefixStore, TCPStore

        if rank == 1:
            store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            PrefixStore("meeting", store).add("hellos", 1)
        time.sleep(2.5)  # ranks look once a second
        say(finished=gather_objects(world, rank))
    elif scenario == "silent store" and rank == 1:
        from tlt.training.ranks.store import Watch, leave_when_silent

        leave_when_silent(Watch(), 0.5, "127.0.0.1:29500")
        time.sleep(60)
    elif scenario == "mistake" and rank == 1:
        raise UserError("model.path: '/nowhere' is missing; give a checkpoint folder")
    elif scenario == "mistake of the store's rank" and rank == 0:
        raise UserError("checkpoints: 'step-3' is a file; move it away")
    elif scenario == "mistake of the store's rank":
        world.store.wait(["never"])
    elif scenario == "fault" and rank == 1:
        raise ZeroDivisionError("in the middle of a step")
    elif scenario == "killed" and rank == 1:
        os.kill(os.getpid(), 9)
    elif scenario == "killed once":
        is_again = os.path.exists("killed once")
        stale = world.store.add("units", 1 if rank == 1 else 0)  # under a prefix of its own, it is 1 in each attempt
        gather_objects(world, "added")
        say(units=world.store.add("units", 0))
        if not is_again and rank == 0:
            world.store.set("said", "")
            world.store.wait(["never"])  # in a collective it could see the other's death before the launcher does
        elif not is_again:
            world.store.wait(["said"])
            open("killed once", "w").close()
            os.kill(os.getpid(), 9)
    elif scenario == "exit" and rank == 1:
        os._exit(7)
    shutdown(world)


def enter_late(scenario, stop):
    """In a forked rank. One that imports torch does not end within the tenth of a second in which the launcher finds it."""
    time.sleep(1.0)
    entry(scenario, stop)


def fork_ranks():
    """Has the launcher fork the ranks from this process, which has imported what they need."""
    import warnings
    from tlt.training.launch import local

    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # Python 3.12
    local.START_METHOD = "fork"


def play(name, scenario, num_ranks, grace, environ, num_restarts, is_spawned):
    """In a session of its own, with what it says in files, so that no pipe stays open; its exit code follows."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.environ.update(environ)
        if not is_spawned:
            fork_ranks()
        code = 99
        try:
            say(started=True)
            begin = entry if is_spawned else enter_late
            code = launch(scenario, num_ranks, begin, grace_seconds=grace, restarts=Restarts(num_restarts))
        finally:
            sys.stderr.flush()
            os._exit(code)
    with open(f"{name}.pid", "w") as file:
        file.write(f"{pid}.")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(f"{name}.code", "w") as file:
        file.write(f"{code}.")


if __name__ == "__main__":
    import tlt.training.ranks.world

    os.chdir(sys.argv[1])
    for line in sys.stdin:
        if os.fork() == 0:
            play(*json.loads(line))
            os._exit(0)
'''


@dataclass
class Outcome:
    """What a scenario left: its exit code, what the ranks said, stderr, and seconds from the last signal
    to the end."""

    code: int = 0
    said: list[dict] = field(default_factory=list)
    stderr: str = ""
    seconds: float = 0.0
    survivors: list[int] = field(default_factory=list)

    def of(self, key: str) -> list:
        """What each rank said under a key, in the order of ranks."""
        return [line[key] for line in sorted(self.said, key=lambda line: line["rank"]) if key in line]


Send = Callable[[int, list[int]], None]


def to_group(number: signal.Signals) -> Send:
    return lambda launcher, _: os.killpg(launcher, number)


def to_parent(number: signal.Signals) -> Send:
    return lambda launcher, _: os.kill(launcher, number)


def to_rank(rank: int, number: signal.Signals) -> Send:
    return lambda _, ranks: os.kill(ranks[rank], number)


def to_rank_that_imports(rank: int, number: signal.Signals) -> Send:
    return lambda launcher, _: os.kill(wait_for_ranks(launcher, rank + 1)[rank], number)


def to_group_while_it_imports(number: signal.Signals) -> Send:
    def send(launcher: int, _: list[int]) -> None:
        wait_for_ranks(launcher, 2)
        os.killpg(launcher, number)

    return send


def wait_for_ranks(launcher: int, num: int) -> list[int]:
    """The launcher starts the ranks in their order; what else the launcher has started runs another program."""
    deadline = time.monotonic() + 60
    while len(found := spawned_by(launcher)) < num and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def spawned_by(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ppid = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if ppid == parent and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


@dataclass(frozen=True)
class Scenario:
    """`signals`: (what to wait for, seconds to wait then, how to send) in turn; `ready` comes once per
    rank. Whoever sends is told the launcher's process id and those of the ranks that have said theirs.
    `is_spawned`: the ranks start as a user's do, and import torch; else they are forked."""

    name: str
    signals: tuple[tuple[str, float, Send], ...] = ()
    num_ranks: int = 2
    grace: float = 200.0
    environ: tuple[tuple[str, str], ...] = ()
    num_restarts: int = 0
    is_spawned: bool = False


CTRL_C = to_group(signal.SIGINT)
SCENARIOS = {
    "collectives": Scenario("collectives", is_spawned=True),
    "mistake": Scenario("mistake", num_restarts=3),
    "mistake of the store's rank": Scenario("mistake of the store's rank", is_spawned=True),
    "fault": Scenario("fault"),
    "killed": Scenario("killed"),
    "killed beside two that compute": Scenario(
        "deaf", (("ready", 0.2, to_rank(1, signal.SIGKILL)),), num_ranks=3
    ),
    "killed beside one that polls": Scenario("loop", (("ready", 0.2, to_rank(0, signal.SIGKILL)),)),
    "killed while the ranks import": Scenario(
        "loop", (("started", 0.0, to_rank_that_imports(1, signal.SIGKILL)),), is_spawned=True
    ),
    "a rank exits": Scenario("exit"),
    "killed once, and started again": Scenario("killed once", num_restarts=3),
    "sigterm, and then a death": Scenario(
        "deaf",
        (("ready", 0.0, to_parent(signal.SIGTERM)), ("ready", 0.5, to_rank(1, signal.SIGKILL))),
        num_restarts=3,
    ),
    "sigterm to one rank": Scenario("agree", (("ready", 0.0, to_rank(1, signal.SIGTERM)),)),
    "sigint to one rank": Scenario("loop", (("ready", 0.0, to_rank(0, signal.SIGINT)),)),
    "sigterm to a rank, and then a death": Scenario(
        "deaf",
        (("ready", 0.0, to_rank(0, signal.SIGTERM)), ("ready", 0.5, to_rank(1, signal.SIGKILL))),
        num_restarts=3,
    ),
    "a rank stands still, and then sigterm": Scenario(
        "agree", (("ready", 0.0, to_rank(1, signal.SIGSTOP)), ("ready", 0.3, to_parent(signal.SIGTERM)))
    ),
    "sigterm, and then a rank is awaited": Scenario("awaited", (("ready", 0.0, to_parent(signal.SIGTERM)),)),
    "a stranger says hello": Scenario("stranger"),
    "a rank leaves a silent store": Scenario("silent store"),
    "parent killed": Scenario("loop", (("ready", 0.0, to_parent(signal.SIGKILL)),)),
    "parent killed while the ranks import": Scenario(
        "loop",
        # 0.3 s: until it has told them what to do, so that nothing is left for which they would have to wait
        (("importing", 0.3, to_parent(signal.SIGKILL)),),
        environ=(("IMPORTS_UNTIL_ORPHANED", "1"),),
        is_spawned=True,
    ),
    "ctrl-c while the ranks import": Scenario(
        "loop", (("started", 0.0, to_group_while_it_imports(signal.SIGINT)),), is_spawned=True
    ),
    "sigterm to the parent": Scenario("loop", (("ready", 0.0, to_parent(signal.SIGTERM)),)),
    "ctrl-c twice": Scenario("deaf", (("ready", 0.0, CTRL_C), ("ready", 0.5, CTRL_C))),
    "grace is over": Scenario("deaf", (("ready", 0.0, CTRL_C),), grace=1.0),
    "one rank": Scenario("loop", (("ready", 0.0, CTRL_C),), num_ranks=1),
    "one rank, ctrl-c twice": Scenario("deaf", (("ready", 0.0, CTRL_C), ("ready", 1.3, CTRL_C)), num_ranks=1),
    "rank from the environment": Scenario("mistake", environ=(("RANK", "0"), ("WORLD_SIZE", "1"))),
}
DEADLINE_SECONDS = 240.0
"""For one scenario; on an idle machine it takes 3 to 5 s."""


def play(server: subprocess.Popen[str], folder: Path, name: str, scenario: Scenario) -> Outcome:
    def read(kind: str) -> str:
        path = folder / f"{name}.{kind}"
        return path.read_text() if path.exists() else ""

    def number(kind: str) -> int | None:
        text = read(kind)
        return int(text[:-1]) if text.endswith(".") else None

    def said() -> list[dict]:
        return [json.loads(line) for line in read("out").split("\n")[:-1]]

    assert server.stdin is not None
    order = [
        name,
        scenario.name,
        scenario.num_ranks,
        scenario.grace,
        dict(scenario.environ),
        scenario.num_restarts,
    ]
    order.append(scenario.is_spawned)
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    outcome = Outcome()
    started_at = sent_at = time.monotonic()
    waiting = list(scenario.signals)
    while (code := number("code")) is None:
        outcome.said = said()
        pid = number("pid")
        if pid is not None and time.monotonic() - started_at > DEADLINE_SECONDS:
            os.killpg(pid, signal.SIGKILL)  # a session of its own: nobody else's processes
        num_needed = 1 if waiting and waiting[0][0] == "started" else scenario.num_ranks
        if pid is not None and waiting and len(outcome.of(waiting[0][0])) >= num_needed:
            _, delay, send = waiting.pop(0)
            time.sleep(delay)
            send(pid, outcome.of("pid"))
            sent_at = time.monotonic()
        time.sleep(0.02)
    outcome.seconds = time.monotonic() - sent_at
    if code == -signal.SIGKILL:  # then the ranks may take a moment longer
        while (survivors := in_session(pid)) and time.monotonic() - sent_at < DEADLINE_SECONDS:
            time.sleep(0.05)
        outcome.survivors += survivors
    outcome.code, outcome.said, outcome.stderr = code, said(), read("err")
    outcome.survivors += [other for other in outcome.of("pid") if is_alive(other)]
    for other in outcome.survivors:
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
    return outcome


def in_session(leader: int) -> list[int]:
    """Whoever is alive of a session: a scenario has its own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            found += [int(folder.name)] if int(session) == leader and state != "Z" else []
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("launch")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "error", str(program), str(folder)]
    played: dict[str, Outcome] = {}
    at_once = threading.Semaphore(3)

    def run(name: str) -> None:
        with at_once:
            played[name] = play(server, folder, name, SCENARIOS[name])

    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, env=environ) as server:
        threads = [threading.Thread(target=run, args=(name,)) for name in SCENARIOS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return played


def test_the_ranks_meet_and_the_run_succeeds(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["collectives"]
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr == ""
    assert outcome.of("gathered") == [[{"rank": 0}, {"rank": 1}]] * 2
    assert outcome.of("threads") == [1, 1]
    assert outcome.of("any") == [True, True]
    assert outcome.of("none") == [False, False]
    assert all(abs(epoch) < 0.1 for epoch in outcome.of("epoch"))
    assert outcome.of("told") == [[{"rank": 0, "pi": 0.1 + 0.2}, None, []]] * 2
    assert [said.partition(":")[2] for said in outcome.of("refused")] == [" mistake 1"] * 2
    first, second = outcome.of("taken")
    assert sorted(first + second) == list(range(100))


def test_averages_are_weighted_by_what_each_rank_trained_on(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["collectives"]
    for total, after, _ in outcome.of("weighted"):
        assert total == 4.0
        assert after[0] == pytest.approx([1.75] * 6)
        assert after[1] == pytest.approx([i * 1.75 / 7 for i in range(4)])
    assert outcome.of("weighted")[0][1] == outcome.of("weighted")[1][1], "ranks differ in bits"
    for total, after, before in outcome.of("unweighted"):
        assert total == 0
        assert after == before
    one_that_trained = outcome.of("alone")[1][2]
    for total, after, _ in outcome.of("alone"):  # the other's tensors hold NaN
        assert total == 5.0
        assert after == one_that_trained
    assert all(after[0] == [1.5] * 6 for key in ("bf16", "double") for _, after, _ in outcome.of(key))
    assert outcome.of("nothing") == [4.0, 4.0]


def test_a_users_mistake_in_a_rank_is_one_line_and_exit_code_2(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["mistake"]
    assert outcome.code == 2
    assert outcome.stderr == "tlt: error: model.path: '/nowhere' is missing; give a checkpoint folder\n"
    assert len(outcome.of("ready")) == 2, "it is not tried again"
    assert not outcome.survivors


def test_torch_says_nothing_of_a_store_that_a_users_mistake_ended(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["mistake of the store's rank"]
    assert outcome.code == 2
    assert outcome.stderr == "tlt: error: checkpoints: 'step-3' is a file; move it away\n"
    assert not outcome.survivors


def test_a_fault_of_ours_shows_that_ranks_own_traceback_once(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["fault"]
    assert outcome.code == 1
    assert outcome.stderr.endswith("tlt: error: rank 1 failed: ZeroDivisionError: in the middle of a step\n")
    assert outcome.stderr.count("Traceback") == 1
    assert "ChildFailedError" not in outcome.stderr
    assert not outcome.survivors


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("killed", 1),
        ("killed beside two that compute", 1),
        ("killed beside one that polls", 0),
        ("killed while the ranks import", 1),
    ],
)
def test_the_rank_that_was_killed_is_named_and_no_other(
    outcomes: dict[str, Outcome], name: str, rank: int
) -> None:
    outcome = outcomes[name]
    assert outcome.code == 1
    assert (
        outcome.stderr
        == f"tlt: error: rank {rank} ended without a word: killed by SIGKILL (out of memory?)\n"
    )
    assert not outcome.survivors


@pytest.mark.parametrize("name", ["killed beside two that compute", "killed beside one that polls"])
def test_the_others_leave_at_once_when_a_rank_is_killed(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].seconds < 25, "a collective's patience is 60 s"


def test_a_rank_that_exits_by_itself_is_named_with_its_exit_code(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["a rank exits"]
    assert (outcome.code, outcome.stderr) == (1, "tlt: error: rank 1 ended without a word: exit code 7\n")


def test_all_ranks_are_started_again_after_a_death_and_one_line_says_so(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["killed once, and started again"]
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr == (
        "tlt: rank 1 ended without a word: killed by SIGKILL (out of memory?); starting again from the "
        "beginning"
        " (restart 1 of 3)\n"
    )
    assert len(outcome.of("ready")) == 4
    assert set(outcome.of("units")) == {1}
    assert not outcome.survivors


@pytest.mark.parametrize("name", ["sigterm, and then a death", "sigterm to a rank, and then a death"])
def test_nothing_is_started_again_once_the_run_was_asked_to_stop(
    outcomes: dict[str, Outcome], name: str
) -> None:
    outcome = outcomes[name]
    assert outcome.code == 1
    assert "restart" not in outcome.stderr
    assert len(outcome.of("ready")) == 2
    assert not outcome.survivors


def test_a_rank_that_stands_still_is_woken_to_finish_its_work(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["a rank stands still, and then sigterm"]
    assert outcome.code == 143, outcome.stderr
    assert outcome.of("finished") == [[0, 1], [0, 1]]


def test_a_rank_that_is_awaited_in_vain_after_a_signal_does_not_change_how_the_run_ends(
    outcomes: dict[str, Outcome],
) -> None:
    outcome = outcomes["sigterm, and then a rank is awaited"]
    assert outcome.code == 143
    said = "RankAwaited: rank 0 has waited 60 s (run.timeout_seconds) in a collective for rank 1; the step under way is lost\n"
    assert outcome.stderr.endswith(said)
    assert outcome.stderr.count("\n") == 2
    assert not outcome.survivors


def test_a_strangers_hello_to_the_store_ends_no_attempt(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["a stranger says hello"]
    assert (outcome.code, outcome.stderr) == (0, "")


def test_a_rank_that_leaves_on_anothers_account_is_reported_with_its_reason(
    outcomes: dict[str, Outcome],
) -> None:
    outcome = outcomes["a rank leaves a silent store"]
    said = "tlt: error: rank 1 has left: the store of rank 0 at 127.0.0.1:29500 has not answered for 1 s (run.timeout_seconds)\n"
    assert (outcome.code, outcome.stderr) == (1, said)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ctrl-c while the ranks import", 130),
        ("sigterm to the parent", 143),
        ("sigterm to one rank", 143),  # the launcher's own means that another rank has failed
        ("sigint to one rank", 130),
    ],
)
def test_the_first_signal_lets_all_ranks_finish_their_work(
    outcomes: dict[str, Outcome], name: str, code: int
) -> None:
    outcome = outcomes[name]
    assert outcome.code == code, outcome.stderr
    assert outcome.of("finished") == [[0, 1], [0, 1]]
    assert outcome.stderr == "tlt: stopping after the work under way; Ctrl-C again ends at once\n"
    assert not outcome.survivors


@pytest.mark.parametrize(
    ("name", "said"), [("ctrl-c twice", "stopped at once"), ("grace is over", "not finished after 1 s")]
)
def test_ranks_that_do_not_finish_are_killed(outcomes: dict[str, Outcome], name: str, said: str) -> None:
    outcome = outcomes[name]
    assert outcome.code == 130
    assert said in outcome.stderr
    assert outcome.seconds < 25, "a collective's patience is 60 s"
    assert not outcome.survivors


def test_one_rank_runs_in_this_process_and_stops_the_same_way(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["one rank"]
    assert outcome.code == 130
    assert outcome.of("finished") == [[0]]
    assert outcomes["one rank, ctrl-c twice"].code == 130
    assert "stopped at once" in outcomes["one rank, ctrl-c twice"].stderr


def test_a_rank_that_somebody_else_started_runs_the_entry_itself(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["rank from the environment"]
    assert outcome.code == 0, outcome.stderr
    assert len(outcome.of("ready")) == 1


def test_when_the_parent_is_killed_the_ranks_finish_and_leave(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["parent killed"]
    assert outcome.code == -signal.SIGKILL
    assert outcome.of("finished") == [[0, 1], [0, 1]]
    assert not outcome.survivors


def test_when_the_parent_is_killed_while_the_ranks_import_they_begin_nothing_and_leave(
    outcomes: dict[str, Outcome],
) -> None:
    outcome = outcomes["parent killed while the ranks import"]
    assert outcome.code == -signal.SIGKILL
    assert not outcome.of("ready")
    assert not outcome.survivors


def test_the_port_of_the_ranks_is_taken_before_they_start(outcomes: dict[str, Outcome]) -> None:
    """Otherwise another process may take it while they import torch."""
    assert outcomes["collectives"].of("is_free") == [False]


def test_the_ranks_of_one_machine_and_their_launcher_listen_on_its_loopback_alone(
    outcomes: dict[str, Outcome],
) -> None:
    """Whoever reaches their ports is taken for a rank."""
    outcome = outcomes["collectives"]
    loopback = {"0100007F", "00000000000000000000000001000000"}
    assert all(outcome.of("listens")), "the store of rank 0, and gloo"
    assert {
        address for found in outcome.of("listens") + outcome.of("launcher") for address in found
    } <= loopback

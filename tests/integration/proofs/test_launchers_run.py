"""The same run under each launcher, a rank of which is killed midway: the policy is the one of the run
that nobody killed, in float64 to the last bit."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.integration.test_run import command, records, same_weights, train, what_the_law_fixes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[3]
STEPS = ("--run.num_steps", "4", "--run.checkpoint_every", "1", "--rollout.speculation", "4x1x4")
SRUN = '''#!/usr/bin/env python3
"""Stands in for srun on one node: starts the tasks with the variables that srun sets, and ends all when one ends badly."""
import os, signal, subprocess, sys, time

step = os.path.join(os.environ["STAND_IN"], "steps")
number = len(open(step).readlines()) if os.path.exists(step) else 0
open(step, "a").write("step\\n")
words = sys.argv[1:]
while words[0].startswith("-"):
    assert words.pop(0) == "--kill-on-bad-exit=1"
num = int(os.environ["SLURM_NTASKS"])
tasks = []
for rank in range(num):
    environ = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_STEP_ID": number}
    tasks.append(subprocess.Popen(words, env={**os.environ, **{name: str(value) for name, value in environ.items()}}))
open(os.path.join(os.environ["STAND_IN"], f"tasks{number}"), "w").write(" ".join(str(task.pid) for task in tasks))
while None in (codes := [task.poll() for task in tasks]) and not any(codes):
    time.sleep(0.05)
for task in tasks:
    if task.poll() is None:
        task.send_signal(signal.SIGTERM)
deadline = time.time() + 60
for task in tasks:
    try:
        task.wait(max(deadline - time.time(), 0))
    except subprocess.TimeoutExpired:
        task.kill()
sys.exit(max(code if code >= 0 else 128 - code for code in (task.wait() for task in tasks)))
'''


@pytest.fixture(scope="module")
def undisturbed(workspace: Path) -> Path:
    return train(workspace, "undisturbed", *STEPS)


@contextmanager
def started(words: list[str], environment: dict[str, str], said: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts a command, and ends it with all it has started, whatever becomes of the test."""
    with said.open("a") as file:
        given = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(words, env=environment, text=True, **given)
    try:
        yield process
    finally:
        for one in descendants(process.pid) if process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.wait()


def words_of(workspace: Path, name: str) -> list[str]:
    return ["-m", "tlt", "train", str(workspace / "run.toml"), "--run.out_dir", str(workspace / name), *STEPS]


def wait_for_steps(out_dir: Path, num: int, process: subprocess.Popen[str], seconds: float = 600.0) -> None:
    """Waits until the run has written so many steps, or ends before."""
    metrics, deadline = out_dir / "metrics.jsonl", time.monotonic() + seconds
    while not (metrics.exists() and metrics.read_text().count("\n") >= num):
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)


def descendants(parent: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [parent]
    for process in found:
        found += sorted(child for child, of in parents.items() if of == process)
    return found


def rank_process(launcher: int, rank: int, program: bytes = b"tlt") -> int:
    """The process of a rank among the descendants of its launcher, by its environment and what it runs:
    its helpers have the same environment."""
    for process in descendants(launcher):
        environ = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environ and program in Path(f"/proc/{process}/cmdline").read_bytes():
            return process
    raise AssertionError(f"no rank {rank}")


def check(out_dir: Path, undisturbed: Path, code: int, said: str) -> None:
    assert code == 0, said
    assert [record.step for record in records(out_dir)] == [1, 2, 3, 4], said
    assert what_the_law_fixes(out_dir) == what_the_law_fixes(undisturbed)
    assert same_weights(out_dir, undisturbed)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


# ── torchrun ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["command", "script"])
def test_torchrun_starts_all_ranks_again_and_the_run_goes_on(
    workspace: Path, undisturbed: Path, how: str
) -> None:
    """Its agent keeps one store through the restart: whatever the first attempt has left there lies under
    another prefix."""
    out_dir, said = workspace / f"torchrun-{how}", workspace / f"torchrun-{how}.txt"
    _, environment = command(workspace)
    words = words_of(workspace, out_dir.name)
    if how == "script":
        script, given = workspace / "script.py", words[4:]
        overrides = {
            key.removeprefix("--"): value for key, value in zip(given[::2], given[1::2], strict=True)
        }
        script.write_text(f"import tlt\n\ntlt.train(tlt.load_config({words[3]!r}, {overrides!r}))\n")
        words = [str(script)]
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 2"
    with started([*torchrun.split(), *words], environment, said) as process:
        wait_for_steps(out_dir, 2, process)
        os.kill(rank_process(process.pid, 1, b"script.py" if how == "script" else b"tlt"), signal.SIGKILL)
        check(out_dir, undisturbed, process.wait(600), said.read_text())
    assert said.read_text().count("resumed after") == 1, said.read_text()


def test_ranks_that_somebody_else_has_started_all_end_as_the_one_that_heard_the_signal(
    workspace: Path,
) -> None:
    """One that ends with 0 beside another's 143 would tell its machine that the run is complete."""
    out_dir, port = workspace / "signal", str(free_port())
    _, environment = command(workspace)
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            environ = {**environment, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            words = [sys.executable, *words_of(workspace, "signal"), "--run.num_steps", "4000"]
            ranks.append(stack.enter_context(started(words, environ, workspace / "signal.txt")))
        wait_for_steps(out_dir, 1, ranks[0])
        ranks[1].send_signal(signal.SIGTERM)
        assert [rank.wait(600) for rank in ranks] == [143, 143], (workspace / "signal.txt").read_text()
    assert "updates are kept" in (workspace / "signal.txt").read_text()


# ── Slurm ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_slurm_script_starts_the_ranks_and_again_after_a_death(
    workspace: Path, undisturbed: Path
) -> None:
    out_dir, said, folder = workspace / "slurm", workspace / "slurm.txt", workspace / "stand-in"
    folder.mkdir()
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    _, environment = command(workspace)
    paths = os.pathsep.join([str(folder), str(Path(sys.executable).parent), environment["PATH"]])
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_NODELIST": "localhost",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": str(free_port()),
    }
    environment |= {"PATH": paths, "STAND_IN": str(folder), **slurm}
    words = ["bash", str(ROOT / "examples/cluster/train.sbatch"), *words_of(workspace, "slurm")[3:]]
    with started(words, environment, said) as process:
        wait_for_steps(out_dir, 2, process)
        os.kill(int((folder / "tasks0").read_text().split()[1]), signal.SIGKILL)
        check(out_dir, undisturbed, process.wait(600), said.read_text())
    assert "train.sbatch: the ranks ended with 137; attempt 1 of 4" in said.read_text()
    assert (folder / "tasks1").exists()


# ── two hosts ───────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces and a cable between them."""
    names = f"tlt-a-{os.getpid()}", f"tlt-b-{os.getpid()}"
    cable = f"va{os.getpid() % 100000}", f"vb{os.getpid() % 100000}"

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise PermissionError(done.stderr.strip())

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for name, end, address in zip(names, cable, ("10.77.3.1/24", "10.77.3.2/24"), strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", address, "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def on_two_hosts(
    workspace: Path,
    name: str,
    act: Callable[[Sequence[subprocess.Popen[str]], Sequence[str]], None],
    *torchrun: str,
    options: Sequence[str] = (),
    second: Sequence[str] = (),
) -> tuple[list[int], str]:
    """Runs a rank on each of two hosts; returns the exit codes of their torchruns, and what was said.

    act: what happens to the torchruns and the hosts meanwhile. options: of the run. second: words that the
    second host's command goes behind.
    """
    saids = [workspace / f"{name}-{rank}.txt" for rank in range(2)]
    _, environment = command(workspace)
    static = "--nproc-per-node 1 --nnodes 2 --rdzv-backend static --master-addr 10.77.3.1 --master-port 29511"
    try:
        with two_hosts() as hosts, ExitStack() as stack:
            processes = []
            for rank, host in enumerate(hosts):
                words = ["ip", "netns", "exec", host, *(second if rank else ()), sys.executable, "-m"]
                words += ["torch.distributed.run", *static.split(), "--node-rank", str(rank), *torchrun]
                given = {**environment, "GLOO_SOCKET_IFNAME": f"v{'ab'[rank]}{os.getpid() % 100000}"}
                run = [*words, *words_of(workspace, name), *options]
                processes.append(stack.enter_context(started(run, given, saids[rank])))
            act(processes, hosts)
            codes = [process.wait(600) for process in processes]
    except (PermissionError, FileNotFoundError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    return codes, "".join(said.read_text() for said in saids)


def other_start_of_the_clock() -> list[str]:
    """Words that give a command a monotonic clock of its own, as a host has that was started days before."""
    words = ["unshare", "--time", "--monotonic", "499000", "--boottime", "499000", "--fork", "--kill-child"]
    works = (
        shutil.which("unshare")
        and subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    )
    return words if works else []


def test_two_hosts_end_with_the_policy_of_one(workspace: Path, undisturbed: Path) -> None:
    """Their monotonic clocks are six days apart, and the seconds of the phases are not."""
    out_dir = workspace / "hosts"

    def kill(torchruns: Sequence[subprocess.Popen[str]], hosts: Sequence[str]) -> None:
        wait_for_steps(out_dir, 2, torchruns[0])
        os.kill(rank_process(torchruns[1].pid, 1), signal.SIGKILL)

    clock = other_start_of_the_clock()
    codes, said = on_two_hosts(workspace, "hosts", kill, "--max-restarts", "2", second=clock)
    check(out_dir, undisturbed, max(codes), said)
    for record in records(out_dir):
        assert 0 <= record.idle.seconds < 2 * record.rollout.seconds < 1000


# ── Ray ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def ray_cluster(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two Ray nodes of one CPU each, on this machine."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install '.[ray]'")
    from ray.cluster_utils import Cluster

    _, environment = command(workspace)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([environment["PYTHONPATH"], str(ROOT)]))
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    yield cluster.address
    cluster.shutdown()


def test_on_ray_an_actor_that_is_killed_costs_time_and_changes_nothing(
    workspace: Path, undisturbed: Path, ray_cluster: str
) -> None:
    out_dir, said = workspace / "ray", workspace / "ray.txt"
    _, environment = command(workspace)
    environment |= {"RAY_ADDRESS": ray_cluster, "PYTHONPATH": os.environ["PYTHONPATH"]}
    words = [sys.executable, *words_of(workspace, "ray"), "--run.launcher", "ray"]
    with started(words, environment, said) as process:
        wait_for_steps(out_dir, 2, process)
        lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(os.getpid())}
        actors = [
            pid
            for pid, line in lines.items()
            if line.exists() and line.read_bytes().startswith(b"ray::RankActor")
        ]
        assert len(actors) == 2, "one for each rank"
        os.kill(max(actors), signal.SIGKILL)
        check(out_dir, undisturbed, process.wait(600), said.read_text())
    (line,) = (line for line in said.read_text().splitlines() if "restart 1 of 3" in line)
    assert "ended without a word: killed on" in line
    assert f"from {out_dir}" in line

"""Whole runs that generate with vLLM: the run of our own engine, whatever is killed. Real processes, the
countdown recipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.arms import RECIPE, SMALL, compare_arms, run_arm
from tests.vllm.parts import in_vllm
from tlt.training.report.step_record import StepRecord, read_metrics

pytestmark = [*in_vllm, pytest.mark.timeout(3600)]

FEW = {"rollout.problems_per_step": 4, "task.num_problems": 64, "run.checkpoint_every": 1}
LORA = {"lora.rank": 4, "optimizer.learning_rate": 3e-3, "optimizer.warmup_steps": 0}


def assert_same(one: Path, other: Path) -> dict[str, Any]:
    """The tokens are the same but for near-ties, and every step began with the same weights."""
    found = compare_arms("", one, other)
    assert all(each["is_near_tie"] for each in found["differences"])
    assert len(found["differences"]) <= 1
    assert found["num_equal"] == found["responses"] - len(found["differences"])
    assert found["same_policies"] == found["steps"] == 3
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank: our own engine, vLLM, and vLLM killed in the third step's rollout and resumed. Adapters
    are trained, quickly: every policy that is published is merged anew, and differs much from the last."""
    folder = tmp_path_factory.mktemp("runs")
    for arm in ("tlt", "vllm", "killed"):
        run_arm(arm, folder / arm, 3, "2,12", {**FEW, **LORA})
    return folder


def test_a_run_with_vllm_is_the_run_of_our_own_engine(runs: Path) -> None:
    assert_same(runs / "tlt", runs / "vllm")


def test_a_run_that_was_killed_amid_a_rollout_goes_on_from_its_journal_with_the_same_tokens(
    runs: Path,
) -> None:
    found = assert_same(runs / "tlt", runs / "killed")
    assert found["recalled_tokens"].keys() == {2}


def processes(session: int) -> dict[int, tuple[int, str]]:
    """Returns the processes of a session that have not ended: process → (parent, command)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended meanwhile
        state, parent, _, its_session = rest.split()[:4]
        if int(its_session) == session and state != "Z":
            found[int(path.name)] = int(parent), command
    return found


def workers(session: int) -> list[int]:
    """Returns vLLM's workers: the children of the ranks, the launcher's children, that are so named."""
    return [process for process, (_, command) in processes(session).items() if command.startswith("VLLM::")]


def wait_for(condition: Any, seconds: float = 1500) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def train(values: dict[str, Any]) -> list[str]:
    overrides = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "tlt", "train", str(RECIPE), *overrides]


def environ() -> dict[str, str]:
    path = os.pathsep.join(sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A sharded run of two ranks that trains its drafter; in tmp_path / "run"."""
    values = {
        **SMALL, **FEW, "run.num_ranks": 2, "run.num_steps": 4, "run.out_dir": tmp_path / "run",
        "rollout.engine": "vllm", "rollout.speculation": "4x1x4", "parallel.policy": "fsdp",
    }  # fmt: skip
    with (tmp_path / "said.txt").open("w") as said:
        run = subprocess.Popen(
            train(values), env=environ(), stdout=said, stderr=said, text=True, start_new_session=True
        )
    yield run
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def records(folder: Path) -> list[StepRecord]:
    path = folder / "run" / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def test_two_ranks_outlive_a_killed_worker_say_so_in_one_line_and_leave_nothing_behind(
    two_ranks: subprocess.Popen[str], tmp_path: Path
) -> None:
    wait_for(lambda: records(tmp_path) or two_ranks.poll() is not None)
    first = workers(two_ranks.pid)
    assert len(first) == 2, (tmp_path / "said.txt").read_text()
    os.kill(first[0], signal.SIGKILL)
    wait_for(lambda: two_ranks.poll() is not None)
    said = (tmp_path / "said.txt").read_text()
    assert two_ranks.returncode == 0, said
    (line,) = (line for line in said.splitlines() if "(restart 1 of" in line)
    assert "vllm: worker 0 has ended: killed by SIGKILL (out of memory?)" in line
    wait_for(lambda: not workers(two_ranks.pid), seconds=30)
    steps = records(tmp_path)
    assert [record.step for record in steps] == [1, 2, 3, 4]
    assert all(record.rollout.accept_length > 1.5 for record in steps)
    assert sum(record.drafter.tokens for record in steps) > 0, "features were computed again, and trained on"


def test_ctrl_c_ends_two_ranks_with_their_workers_after_the_work_under_way(
    two_ranks: subprocess.Popen[str], tmp_path: Path
) -> None:
    wait_for(lambda: records(tmp_path) or two_ranks.poll() is not None)
    assert len(workers(two_ranks.pid)) == 2, (tmp_path / "said.txt").read_text()
    os.killpg(two_ranks.pid, signal.SIGINT)  # as a terminal sends it, to vLLM's workers too
    wait_for(lambda: two_ranks.poll() is not None)
    said = (tmp_path / "said.txt").read_text()
    assert two_ranks.returncode in (0, 130), said
    assert "Continue with: tlt train --resume" in said or two_ranks.returncode == 0
    assert "has ended" not in said
    wait_for(lambda: not workers(two_ranks.pid), seconds=30)


def test_a_rank_that_is_killed_takes_its_worker_along(
    two_ranks: subprocess.Popen[str], tmp_path: Path
) -> None:
    wait_for(lambda: records(tmp_path) or two_ranks.poll() is not None)
    running = processes(two_ranks.pid)
    before = workers(two_ranks.pid)
    os.kill(running[before[0]][0], signal.SIGKILL)
    wait_for(lambda: before[0] not in processes(two_ranks.pid), seconds=60)
    os.kill(two_ranks.pid, signal.SIGKILL)
    wait_for(lambda: not workers(two_ranks.pid), seconds=120)

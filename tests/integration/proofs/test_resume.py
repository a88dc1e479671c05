"""A run that goes on with another number of ranks, by a command that a scheduler repeats, after the death
of a rank, and from an older checkpoint by choice, is the run that was never interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.test_run import PATIENCE, command, records, same_weights, what_the_law_fixes

pytestmark = pytest.mark.timeout(4 * PATIENCE)
EVERY = ("--run.checkpoint_every", "1", "--run.keep_checkpoints", "3", "--evaluation.num_problems", "0")


def train(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words, environment = command(workspace, *arguments)
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def go_on(workspace: Path, folder: Path, *arguments: str) -> None:
    """The command that a scheduler repeats: it begins the run, and goes on with it."""
    repeated = (str(workspace / "run.toml"), "--resume", "auto", "--run.out_dir", str(folder))
    done = train(workspace, *repeated, *EVERY, *arguments)
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.fixture(scope="module")
def straight(workspace: Path) -> Path:
    go_on(workspace, workspace / "straight", "--run.num_steps", "3")
    return workspace / "straight"


@pytest.fixture(scope="module")
def moved(workspace: Path) -> Path:
    for num_steps, num_ranks in ((1, 2), (2, 1), (3, 2)):
        go_on(
            workspace,
            workspace / "moved",
            "--run.num_steps",
            str(num_steps),
            "--run.num_ranks",
            str(num_ranks),
        )
    return workspace / "moved"


def assert_same_run(one: Path, other: Path) -> None:
    """The same tokens; numbers but for the order in which one rank and two add up."""
    for ours, theirs in zip(what_the_law_fixes(one), what_the_law_fixes(other), strict=True):
        for key, value in ours.items():
            assert value == (
                pytest.approx(theirs[key], abs=1e-9) if isinstance(value, float) else theirs[key]
            ), key
    a, b = (load_file(folder / "policy" / "model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=0, atol=1e-9)


def test_two_ranks_then_one_then_two_are_the_run_never_interrupted(moved: Path, straight: Path) -> None:
    assert_same_run(moved, straight)
    checkpoints = sorted((moved / "checkpoints").iterdir())
    assert [len(list(path.glob("*.json"))) for path in checkpoints] == [3, 2, 3], (
        "a manifest, and a file for each rank"
    )


def test_a_damaged_checkpoint_is_one_line_and_an_older_one_is_gone_on_from_by_choice(
    workspace: Path, moved: Path, straight: Path
) -> None:
    shard = moved / "checkpoints" / "step-00000003" / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 8
    shard.write_bytes(data)
    refused = train(workspace, "--resume", str(moved))
    older = moved / "checkpoints" / "step-00000002"
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.strip().endswith(f"go on from the checkpoint before it: tlt train --resume {older}")
    assert f"{shard}: is not as it was written" in refused.stderr
    assert refused.stderr.count("\n") == 1
    chosen = train(workspace, "--resume", str(older))
    assert chosen.returncode == 0, chosen.stderr + chosen.stdout
    assert "step-00000003.aside" in chosen.stdout
    assert [record.step for record in records(moved)] == [1, 2, 3]
    assert_same_run(moved, straight)


def kill_a_rank_amid_the_run(words: list[str], environment: dict[str, str], out_dir: Path) -> tuple[int, str]:
    """SIGKILL to rank 1 after two steps of three; returns the exit code and what was said."""
    process = subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics, deadline = out_dir / "metrics.jsonl", time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.02)
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


def rank_process(launcher: int, rank: int) -> int:
    """The process of a rank, among the descendants of its launcher, by its environment or, where that was
    changed within the process, by the order in which the ranks were started."""
    children: list[int] = []
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command_line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == launcher and (b"spawn_main" in command_line or b"tlt" in command_line):
            children.append(int(folder.name))
    return children[rank]


def test_a_rank_that_is_killed_costs_time_and_changes_nothing(workspace: Path, straight: Path) -> None:
    out_dir = workspace / "killed"
    begun = (str(workspace / "run.toml"), "--run.out_dir", str(out_dir), *EVERY, "--run.num_steps", "3")
    code, output = kill_a_rank_amid_the_run(*command(workspace, *begun), out_dir)
    assert code == 0, output
    (line,) = (line for line in output.splitlines() if "restart" in line)
    assert line.startswith(
        "tlt: rank 1 ended without a word: killed by SIGKILL (out of memory?); starting again from "
    )
    assert line.endswith(" (restart 1 of 3)")
    assert what_the_law_fixes(out_dir) == what_the_law_fixes(straight)
    assert same_weights(out_dir, straight)

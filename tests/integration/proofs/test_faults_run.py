"""Faults that no process dies of: a rank that is ten times slower, one that hangs, a network that is gone
for a while or for good. The run ends with the policy of the run that met none, in float64 to the last bit,
or by itself with one line that names who is awaited."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.proofs.test_launchers_run import (
    ROOT,
    check,
    command,
    on_two_hosts,
    started,
    wait_for_steps,
)
from tests.integration.test_run import same_weights, train, what_the_law_fixes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = ("--run.num_steps", "4", "--run.checkpoint_every", "1", "--rollout.speculation", "4x1x4")
ENTRY = '''
"""A run whose rank 1 is at fault, in a way that the test names."""
import os, sys, time
from pathlib import Path

FAULT, MARK = os.environ["FAULT"], Path(os.environ["MARK"])

def main(description, stop):
    from tlt.engine.own.engine import RolloutEngine
    from tlt.training.update.update import PolicyTrainer
    from tlt.training import loop

    where = {"update": (PolicyTrainer, "update")}.get(FAULT.split()[-1], (RolloutEngine, "step"))
    done = getattr(*where)

    def at_fault(self, *arguments, **options):
        start = time.perf_counter()
        result = done(self, *arguments, **options)
        if FAULT.startswith("slow"):
            time.sleep(9 * (time.perf_counter() - start))
        elif getattr(self, "policy_version", getattr(self, "next_step", 0)) >= 1 and not MARK.exists():
            MARK.touch()
            time.sleep(10_000)
        return result

    if os.environ["RANK"] == "1":
        setattr(*where, at_fault)
    loop.main(description, stop)

if __name__ == "__main__":
    from tlt.base.clock import Moment
    from tlt.base.config.load import load_config
    from tlt.training.launch.failures import Restarts
    from tlt.training.launch.local import launch
    from tlt.apps.run.start import describe_run, describe_saved, prepare

    config = prepare(load_config(sys.argv[1], sys.argv[2:]))
    restarts = Restarts(config.run.max_restarts, lambda: describe_saved(config.run.out_dir))
    sys.exit(launch(describe_run(config, Moment.now()), config.run.num_ranks, "at_fault:main", restarts=restarts))
'''


@pytest.fixture(scope="module")
def undisturbed(workspace: Path) -> Path:
    (workspace / "at_fault.py").write_text(ENTRY)
    return train(workspace, "undisturbed", *STEPS)


def run_with(workspace: Path, fault: str, timeout_seconds: float) -> tuple[Path, int, str]:
    """Returns (the run's folder, the exit code, what was said)."""
    name = fault.replace(" ", "-")
    _, environment = command(workspace)
    paths = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
    environment |= {"FAULT": fault, "MARK": str(workspace / f"{name}.mark"), "PYTHONPATH": paths}
    words = [str(workspace / "run.toml"), "--run.out_dir", str(workspace / name), *STEPS]
    words += ["--run.timeout_seconds", f"{timeout_seconds:g}"]
    said = workspace / f"{name}.txt"
    with started([sys.executable, str(workspace / "at_fault.py"), *words], environment, said) as process:
        code = process.wait(900)
    return workspace / name, code, said.read_text()


def test_a_rank_that_is_ten_times_slower_costs_time_and_no_time_out(
    workspace: Path, undisturbed: Path
) -> None:
    out_dir, code, said = run_with(workspace, "slow step", 600)
    check(out_dir, undisturbed, code, said)
    assert "restart" not in said


@pytest.mark.parametrize("where", ["step", "update"])
def test_a_rank_that_hangs_is_named_and_all_are_started_again(
    workspace: Path, undisturbed: Path, where: str
) -> None:
    out_dir, code, said = run_with(workspace, f"hang in {where}", 20)
    check(out_dir, undisturbed, code, said)
    (line,) = (line for line in said.splitlines() if "restart 1 of 3" in line)
    if where == "step":
        assert "replica 0 waits for replica 1, which holds" in line
        assert "no sign of life" in line
    else:
        assert (
            "RankAwaited: rank 0 has waited 20 s (run.timeout_seconds) in a collective for rank 1; "
            "starting again" in line
        )


# ── a network that is gone ──────────────────────────────────────────────────────────────────────────────────


def play_with_a_cut(
    workspace: Path, name: str, seconds: float, timeout_seconds: float
) -> tuple[list[int], str]:
    """Runs two hosts, a rank each, whose cable is cut for so long once a step has been done. Returns (the
    exit codes of their torchruns, what was said)."""

    def cut(torchruns: Sequence[subprocess.Popen[str]], hosts: Sequence[str]) -> None:
        wait_for_steps(workspace / name, 1, torchruns[0])
        cable = ["ip", "-n", hosts[1], "link", "set", f"vb{os.getpid() % 100000}"]
        subprocess.run([*cable, "down"], check=True)
        time.sleep(seconds)
        if seconds < timeout_seconds:
            subprocess.run([*cable, "up"], check=True)

    options = ("--run.timeout_seconds", f"{timeout_seconds:g}")
    return on_two_hosts(workspace, name, cut, "--max-restarts", "0", options=options)


def test_a_network_that_is_gone_for_three_seconds_costs_time_and_changes_nothing(
    workspace: Path, undisturbed: Path
) -> None:
    codes, said = play_with_a_cut(workspace, "cut-short", 3.0, 300.0)
    check(workspace / "cut-short", undisturbed, max(codes), said)
    assert "resumed after" not in said


def test_a_network_that_is_gone_for_good_ends_the_run_on_both_hosts(
    workspace: Path, undisturbed: Path
) -> None:
    codes, said = play_with_a_cut(workspace, "cut-off", 20.0, 15.0)
    assert all(codes), said
    assert "the store of rank 0 at 10.77.3.1:29511 has not answered for" in said
    assert "rank 0 has waited 15 s" in said or "replica 0 waits for replica 1" in said or "onnection" in said
    again = ("--resume", str(workspace / "cut-off"), "--run.num_ranks", "2", "--run.timeout_seconds", "300")
    words, environment = command(workspace, *again)
    resumed = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert resumed.returncode == 0, resumed.stderr
    assert what_the_law_fixes(workspace / "cut-off") == what_the_law_fixes(undisturbed)
    assert same_weights(workspace / "cut-off", undisturbed)

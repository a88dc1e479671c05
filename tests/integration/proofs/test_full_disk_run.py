"""A disk that is full from some moment on, wherever a run writes: it ends by itself with one line and exit
code 2, the last checkpoint is whole, and with room again the run goes on to the policy of the run that had
room all along.

The kernel refuses, by RLIMIT_FSIZE: no file may grow beyond a byte from the moment at which the named
function is called.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_run import command, records, same_weights, what_the_law_fixes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PLACES = {
    "the start": ("tlt.training.run:Run.__init__", 1),
    "the timeline": ("tlt.report.timeline:Timeline.flush", 3),
    "the metrics": ("tlt.report.record:MetricsWriter.write", 3),
    "an evaluation": ("tlt.training.evaluations:Evaluations.add", 2),
    "the best policy": ("tlt.training.run:Run.save_policy", 1),
    "a checkpoint": ("tlt.saved.checkpoint:CheckpointWriter.save", 2),
    "the last products": ("tlt.training.loop:write_products", 1),
}
PROGRAM = '''
"""Plays runs, each in a fork of this process: what takes the time is importing torch."""
import json, os, pkgutil, resource, sys, time

def full_from(place, number):
    owner, _, name = place.rpartition("." if "." in place.partition(":")[2] else ":")
    owner, calls = pkgutil.resolve_name(owner), 0
    done = getattr(owner, name)
    def call(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == number:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        return done(*arguments, **options)
    setattr(owner, name, call)

def play(words, place, number):
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        for stream in (1, 2):
            os.dup2(write, stream)
        os.close(write), os.close(read)
        if place:
            full_from(place, number)
        code = 99
        try:
            code = main(["train", *words])
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said

if __name__ == "__main__":
    import transformers
    import tlt.training.start
    from tlt.cli.main import main
    config, folder, places = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    few = ["--run.num_ranks", "1", "--run.num_steps", "4", "--evaluation.every", "2", "--rollout.speculation", "4x1x4"]
    found = {"none": play([config, "--run.out_dir", f"{folder}/none", *few], None, 0)}
    for name, (place, number) in places.items():
        out = f"{folder}/{name}"
        first = play([config, "--run.out_dir", out, *few], place, number)
        checkpoints = sorted(os.listdir(f"{out}/checkpoints")) if os.path.exists(f"{out}/checkpoints") else []
        found[name] = (*first, checkpoints, *play([config, "--run.out_dir", out, "--resume", "auto", *few], None, 0))
    print(json.dumps(found))
'''


@pytest.fixture(scope="module")
def played(workspace: Path) -> dict[str, Any]:
    (workspace / "full.py").write_text(PROGRAM)
    _, environment = command(workspace)
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[3])
    words = [
        sys.executable,
        str(workspace / "full.py"),
        str(workspace / "run.toml"),
        str(workspace),
        json.dumps(PLACES),
    ]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=1400)
    assert done.returncode == 0, done.stderr
    played: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return played


def test_a_run_that_has_room_ends_well(played: dict[str, Any]) -> None:
    code, said = played["none"]
    assert code == 0, said


@pytest.mark.parametrize("place", PLACES)
def test_a_full_disk_is_one_line_and_with_room_again_the_run_goes_on(
    place: str, played: dict[str, Any], workspace: Path
) -> None:
    code, said, checkpoints, resumed, said_then = played[place]
    assert code == 2, said
    assert "Traceback" not in said
    (line,) = (line for line in said.splitlines() if line.startswith("tlt: error: "))
    assert "cannot be written" in line or "is not written" in line
    assert "make room" in line
    assert checkpoints or place not in ("the metrics", "a checkpoint", "the last products")
    assert resumed == 0, said_then
    out_dir, undisturbed = workspace / place, workspace / "none"
    assert [record.step for record in records(out_dir)] == [1, 2, 3, 4]
    assert what_the_law_fixes(out_dir) == what_the_law_fixes(undisturbed)
    assert same_weights(out_dir, undisturbed)

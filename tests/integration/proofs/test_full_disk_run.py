"""A disk that is full from some moment on, wherever a run writes: it ends by itself with one line and exit code 2, the last
checkpoint is whole, and with room again the run goes on to the policy of the run that had room all along.

The kernel refuses, by RLIMIT_FSIZE: no file may grow beyond a byte from the moment at which the named function is called.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.disks import Fault, fail_at, play
from tests.integration.test_run import records, same_weights, what_the_law_fixes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PLACES = {
    "the start": ("tlt.training.run:Run.__init__", 1),
    "the timeline": ("tlt.report.timeline:Timeline.flush", 3),
    "the metrics": ("tlt.report.metrics:MetricsWriter.write", 3),
    "an evaluation": ("tlt.training.evaluations:Evaluations.add", 2),
    "the best policy": ("tlt.training.run:Run.save_policy", 1),
    "a checkpoint": ("tlt.training.saved.checkpoint:CheckpointWriter.save", 2),
    "the last products": ("tlt.training.loop:write_products", 1),
}
FEW = ("--run.num_ranks", "1", "--run.num_steps", "4", "--evaluation.every", "2", "--rollout.speculation", "4x1x4")


def fill_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))


@pytest.fixture(scope="module")
def played(workspace: Path) -> dict[str, Any]:
    """What came of each run, of its checkpoints, and of the run that went on with room again."""
    environ = {"PYTHONPATH": os.pathsep.join([str(workspace), str(Path(__file__).parents[3])])}

    def train(name: str, *words: str, prepare: Callable[[], None] = lambda: None) -> tuple[int | None, str]:
        words = (str(workspace / "run.toml"), "--run.out_dir", str(workspace / name), *FEW, *words)
        return play(workspace, words, prepare, **environ)

    found: dict[str, Any] = {"none": train("none")}
    for name, (function, number) in PLACES.items():
        fails = partial(fail_at, Fault(name, "full", function, number), fill_disk)
        first = train(name, prepare=fails)
        checkpoints = sorted(path.name for path in (workspace / name).glob("checkpoints/*"))
        found[name] = (*first, checkpoints, *train(name, "--resume", "auto"))
    return found


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
    assert [record.step for record in records(out_dir)] == [0, 1, 2, 3]
    assert what_the_law_fixes(out_dir) == what_the_law_fixes(undisturbed)
    assert same_weights(out_dir, undisturbed)

"""`make gpu`: its parts are bounded in time and fail alone, whatever they measure."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.harness import Outcome, Part, run_parts
from benchmarks.gpu.parts import SECONDS, parts_of_gpu, parts_of_rehearsal
from benchmarks.gpu.report import to_markdown

START = """
import json, sys
settings = json.loads(sys.argv[1])
def write(**values): open(settings["out"], "w").write(json.dumps(values))
"""
SOURCES = {
    "breaks": "write(done=1)\nraise ValueError('no such kernel')",
    "lingers": "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
    "write(child=child.pid)\ntime.sleep(600)",
    "works": "write(given=settings['given'])",
    "declines": "write(skipped='there is no such package')",
}


def part(folder: Path, name: str, seconds: float) -> Part:
    """Returns a part that runs one of the sources."""
    (folder / f"{name}.py").write_text(START + SOURCES[name])
    return Part(name, name, seconds, {"given": 7}, {"PYTHONPATH": str(folder)})


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_part_that_fails_and_one_that_lingers_leave_the_others_their_turn_and_are_reported(
    tmp_path: Path,
) -> None:
    noted: list[list[str]] = []
    parts = [part(tmp_path, "breaks", 20), part(tmp_path, "lingers", -17), part(tmp_path, "works", 20)]
    began = time.monotonic()
    outcomes = run_parts(
        [*parts, part(tmp_path, "declines", 10)], 60, lambda found: noted.append([o.status for o in found])
    )
    assert time.monotonic() - began < 40, "what lingers is ended"
    assert noted[-1] == ["failed", "timed out", "ok", "skipped"]
    assert noted[0] == ["failed"], "told at once"
    broken, lingered, worked, _ = outcomes
    assert broken.record == {"done": 1}, "what was measured before stays"
    assert "no such kernel" in broken.output
    assert lingered.record is not None
    assert not is_running(lingered.record["child"]), "with all that it has started"
    assert worked.record == {"given": 7}
    text = to_markdown({"command": "make gpu", "rehearsed": False}, outcomes)
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "| failed |" in rows["breaks"]
    assert "no such kernel" in rows["breaks"]
    assert "| timed out |" in rows["lingers"]
    assert "| ok |" in rows["works"]
    assert "there is no such package" in rows["declines"]


def test_what_a_part_leaves_of_its_time_goes_to_the_later_ones_and_none_goes_on_beyond_the_end(
    tmp_path: Path,
) -> None:
    first, second, third = run_parts(
        [part(tmp_path, "works", s) for s in (10, 5, 30)], 20, lambda found: None
    )
    assert 14 < second.limit < 15, "what the first one left"
    assert third.limit < 20
    (late,) = run_parts([part(tmp_path, "works", 10)], 0.0, lambda found: None)
    assert (late.status, first.status) == ("no time left", "ok")


def test_all_parts_together_take_ten_minutes_at_most_and_each_is_there() -> None:
    parts = parts_of_gpu()
    assert sum(part.seconds for part in parts) == SECONDS == 600
    assert len({part.name for part in parts}) == len(parts)
    rehearsed = {part.module for part in parts_of_rehearsal()}
    for one in parts:
        assert callable(importlib.import_module(one.module).main)
        assert one.module in rehearsed


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    for words, told in (
        ([], "make gpu-rehearse"),
        (["--only", "laws"], "'laws' is unknown; give some of environment, law"),
    ):
        monkeypatch.setattr("sys.argv", ["gpu", *words])
        assert command.main() == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line


def test_a_report_is_made_of_whatever_there_is() -> None:
    outcomes = [Outcome(part.name, "timed out", 1.0, 1.0, {}, "") for part in parts_of_gpu()]
    assert to_markdown({"command": "make gpu", "rehearsed": True}, outcomes).count("| timed out |") == len(
        outcomes
    )
    record = {
        "lines": ["a model"],
        "peak_gib": 12345.6,
        "steps": [
            {"batch": 1, "ratio": {"mean": 1.5, "low": 1.2, "high": 1.9}},
            {"batch": 4, "waits": {"a.py:3": 1.0}},
        ],
    }
    text = to_markdown(
        {"command": "make gpu", "rehearsed": True}, [Outcome("steps", "timed out", 1.0, 1.0, record, "")]
    )
    assert "a model.\n\npeak gib: 12,346\n\n| batch | ratio | waits |" in text
    assert "| 1 | 1.50 (1.20 – 1.90) | – |\n| 4 | – | a.py:3 1 |" in text

"""One RL step at the size of a large model (benchmarks/step_at_size.py): what is run, what of it counts,
how it is told."""

from __future__ import annotations

import argparse
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step_at_size
from benchmarks.command import carry_out
from tests.unit.report.records import record
from tlt.config.load import load_config
from tlt.config.schema import Config

OPTIONS = argparse.Namespace(config=Path("mine.toml"), threads=2)


@pytest.fixture
def grown(tmp_path: Path) -> Config:
    for name in ("model", "drafter"):
        (tmp_path / name).mkdir()
    return load_config(
        "countdown", ["--model.path", str(tmp_path / "model"), "--drafter.path", str(tmp_path / "drafter")]
    )


def stands_in(
    monkeypatch: pytest.MonkeyPatch, returncode: int = 0, stdout: str = "", stderr: str = ""
) -> list[list[str]]:
    """Runs nothing: leaves the metrics of two steps. Returns the command lines."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        out_dir = Path(command[command.index("--run.out_dir") + 1])
        out_dir.mkdir(parents=True)
        (out_dir / "metrics.jsonl").write_text("".join(record(step).to_json() + "\n" for step in (1, 2)))
        return subprocess.CompletedProcess(command, returncode, stdout, stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.mark.parametrize(
    ("way", "ranks", "threads"), [("full", 1, 2), ("full-sharded", 2, 1), ("lora-two-ranks", 2, 1)]
)
def test_the_last_step_counts_and_the_threads_are_shared_by_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, grown: Config, way: str, ranks: int, threads: int
) -> None:
    commands = stands_in(monkeypatch, stdout="told\n1536\n")
    found = step_at_size.run_steps(OPTIONS, grown, way, tmp_path / "run", ["--sampling.max_tokens", "64"])
    assert found == {"way": way, **step_at_size.kept(record(2)), "peak_mib": 1536}
    (command,) = commands
    given = dict(pairwise(command))
    assert (given["--run.num_ranks"], given["--run.threads_per_rank"]) == (str(ranks), str(threads))
    assert given["--model.path"] == str(grown.model.path)
    assert ("--lora.rank" in command) is way.startswith("lora")
    assert command[-2:] == ["--sampling.max_tokens", "64"], "the user's own words come last"


def test_a_way_that_is_refused_stands_in_the_report_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, grown: Config
) -> None:
    stands_in(monkeypatch, returncode=2, stderr="loading …\ntlt train: error: 14.3 GiB a rank of 11.8\n")
    found = step_at_size.run_steps(OPTIONS, grown, "full", tmp_path / "run", [])
    assert found == {"way": "full", "failed": "tlt train: error: 14.3 GiB a rank of 11.8"}
    ran = {
        "way": "lora",
        **step_at_size.kept(record(2)),
        "num_tokens": 1909,
        "accept_length": 2.5,
        "peak_mib": 2048,
    }
    report = {"command": "c", "environment": {}, "config": {}, "runs": [found, ran]}
    lines = step_at_size.to_markdown(report).splitlines()
    assert "| lora | 1909 | 0.5 | 0.5 | 0.5 | 2.50 | 2.0 |" in lines
    assert lines[-1] == "full: tlt train: error: 14.3 GiB a rank of 11.8"


def test_a_mistake_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["step_at_size", "countdown", "--geometry", "qwen9", "--out", "result"])
    assert carry_out("step_at_size", step_at_size.main) == 2
    assert capsys.readouterr().err.startswith(
        "benchmarks.step_at_size: error: --geometry: 'qwen9' is unknown"
    )

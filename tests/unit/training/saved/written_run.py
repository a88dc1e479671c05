"""A run's folder for tests, written without a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tests.unit.training.report.records import record
from tlt.base.config.load import load_config
from tlt.base.io.files import write_jsonl
from tlt.training.saved.evaluations import Evaluation


def write_run(folder: Path, num_steps: int, done: int, checkpoint: int | None = None) -> Path:
    folder.mkdir()
    config = load_config("countdown", {"run.out_dir": str(folder), "run.num_steps": num_steps})
    (folder / "config.json").write_text(config.to_json())
    lines = [record(step, step_seconds=60.0).to_json() for step in range(1, done + 1)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    evaluation = Evaluation(0, 0.25, 1.0, {"p": 0.25}, {}, 0.25, {"p": 0.25}, 0)
    write_jsonl(folder / "evaluations.jsonl", [asdict(evaluation)])
    if checkpoint is not None:
        (folder / f"checkpoints/step-{checkpoint:08d}").mkdir(parents=True)
        (folder / f"checkpoints/step-{checkpoint:08d}.newer").mkdir()
    return folder

"""Makes what every case begins with, all of it sound: a model, a drafter, and the folder of a run that was
killed."""

from __future__ import annotations

import functools
import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import workspace
from tests.faults.commands import Command, run
from tests.faults.mutations import to_toml
from tests.faults.workspace import ROOT
from tlt.apps.cli.main import main as tlt
from tlt.models.hf.tokenizer import load_tokenizer

CONFIG: dict[str, Any] = {
    "run": {"num_steps": 2, "num_ranks": 1, "dtype": "float64", "seed": 7, "device": "cpu"},
    "parallel": {"policy": "auto"},
    "model": {"path": "model"},
    "task": {
        "name": "countdown",
        "num_problems": 8,
        "options": {"mix": {"2": 0.5, "3": 0.5}, "max_number": 12},
    },
    "rollout": {
        "problems_per_step": 2,
        "samples_per_problem": 2,
        "max_batch_size": 4,
        "speculation": "adaptive",
    },
    "sampling": {"max_tokens": 8, "temperature": 1.0, "stop": ["\n"]},
    "drafter": {"path": "drafter", "train": True},
    "algorithm": {"clip_low": 0.2, "minibatches": 1},
    "optimizer": {"learning_rate": 1e-4, "schedule": "cosine"},
    "evaluation": {"num_problems": 4, "samples_per_problem": 1},
    "rewards": {"num_workers": 1, "timeout_seconds": 5.0},
    "tracking": {"use": [], "project": "fuzz"},
}
RUN_CHANGES = {
    "run": {"num_steps": 3, "checkpoint_every": 1, "keep_responses": 1.0},
    "task": {"name": "digits:TASK", "num_problems": 8, "options": {}},
    "rollout": {"speculation": "ahead+hybrid:64x1x64", "ahead": 1},
    "evaluation": {"every": 1},
}


@dataclass(frozen=True)
class Sound:
    """model, drafter: folders.
    run: the folder of a run that was killed in its third step; its task is in `tasks`."""

    model: Path
    drafter: Path
    run: Path
    tasks: Path


def make_models(folder: Path) -> Sound:
    """Writes a random model with Countdown's tokenizer, and a drafter."""
    workspace.make_models(folder, (16, 24, 2, 2, 1, 8), max_positions=128, std=0.02)
    return Sound(folder / "model", folder / "drafter", folder / "sound-run" / "run", folder / "sound-run")


def preload(sound: Sound) -> None:
    """Imports here what commands import when they need it: they are forks of this process, and find it
    there."""
    for name in (
        "apps.run.start",
        "training.loop",
        "drafter.measure",
        "drafter.formats.export",
        "apps.audit.report",
    ):
        importlib.import_module(f"tlt.{name}")
    load_tokenizer(sound.model)


def make_run(sound: Sound) -> None:
    """Trains for two steps and, in the third, until two of its responses are scored: then the rank is
    killed. The folder has a journal then, and everything else."""
    folder, marks = sound.tasks, sound.tasks / "marks"
    marks.mkdir(parents=True)
    (folder / "digits.py").write_text(workspace.PASSING_TASK)
    config: dict[str, Any] = json.loads(json.dumps(CONFIG))
    config["model"]["path"], config["drafter"]["path"] = str(sound.model), str(sound.drafter)
    for section, values in RUN_CHANGES.items():
        config[section] |= values
    (folder / "run.toml").write_text(to_toml(config))
    plan = {"place": "score train", "call": 11, "does": "SIGKILL", "whom": "rank", "marks": str(marks)}
    words = ("train", str(folder / "run.toml"), "--run.out_dir", str(sound.run))
    environ = {"DISTURB": json.dumps(plan), "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    ending = run(Command(folder, functools.partial(tlt, words), environ=environ), 120.0)
    assert ending.code == 137, (ending.out, ending.err)
    assert [*sound.run.glob("journal/step-*/*")], "it has a journal"

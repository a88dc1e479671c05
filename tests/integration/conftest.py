"""A workspace for whole runs: a tiny policy, its drafter, a task and a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.workspace import make_models
from tests.integration.programs import Programs
from tlt.apps.cli import main as cli

Tlt = Callable[..., int]
"""Runs `tlt WORDS…`; returns the exit code."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy with Countdown's tokenizer, and a random drafter."""
    folder = tmp_path_factory.mktemp("workspace")
    make_models(folder)
    (folder / "run.toml").write_text(
        """
        [run]
        num_steps = 5
        num_ranks = 2
        dtype = "float64"
        checkpoint_every = 2
        [model]
        path = "model"
        [task]
        name = "digits:TASK"
        num_problems = 12
        [rollout]
        problems_per_step = 4
        samples_per_problem = 4
        max_batch_size = 8
        speculation = "adaptive"
        [sampling]
        max_tokens = 48
        [drafter]
        path = "drafter"
        train = true
        [optimizer]
        learning_rate = 3e-3
        [evaluation]
        num_problems = 6
        samples_per_problem = 2
        """
    )
    return folder


@pytest.fixture
def tlt_here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Tlt:
    """`tlt` in this process, as one rank is."""
    monkeypatch.syspath_prepend(workspace)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(workspace), os.environ.get("PYTHONPATH", "")]))
    return lambda *words: cli.main(words)


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Where `python -m tlt …` is forked: most runs here are no test of how a process starts."""
    programs = Programs()
    yield programs
    programs.close()

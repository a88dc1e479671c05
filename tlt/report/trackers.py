"""Trackers: W&B, TensorBoard, Trackio or the user's own, each a few lines over its library, in a process of its own.

Knows figures with names and the libraries, and neither steps nor models. The process imports this module, so it imports nothing
heavy; a library is imported when its tracker begins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tlt.extras import how_to_install
from tlt.plugins import describe, get_object
from tlt.types import UserError


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run before its first figures.

    run_id: the same in all attempts at this run, and no other run's.  folder: the run's.
    config: all settings, section → key → value.  step: updates done by earlier attempts; figures of later steps follow.
    """

    name: str
    project: str
    run_id: str
    folder: Path
    config: Mapping[str, Any]
    step: int


class Tracker(Protocol):
    """Takes the figures of one run. Whatever it raises, and however long it takes, the run goes on."""

    def begin(self, run: TrackedRun) -> str:
        """Starts or continues the run; returns where its figures can be seen, in one line."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds figures, name → finite number, of the policy after `step` updates. A step may come more than once."""
        ...

    def finish(self) -> None:
        """Delivers what has not been delivered."""
        ...


class WandbTracker:
    """Weights & Biases. Account, entity, mode and server are its own environment's: WANDB_API_KEY, WANDB_ENTITY, WANDB_MODE."""

    def begin(self, run: TrackedRun) -> str:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        return f"offline; to upload: wandb sync {Path(self._run.dir).parent}" if self._run.offline else self._run.url or ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """TensorBoard's event files, in the run's folder. What an earlier attempt wrote of later steps is hidden."""

    def begin(self, run: TrackedRun) -> str:
        from tensorboardX import SummaryWriter

        folder = run.folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=run.step + 1)
        config = json.dumps(run.config, indent=2)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in config.splitlines()), run.step)
        return f"tensorboard --logdir {folder}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class TrackioTracker:
    """Trackio: a database of its own under TRACKIO_DIR, or the Space that TRACKIO_SPACE_ID names. Runs are told apart by their
    names, so the run's id is part of it."""

    def begin(self, run: TrackedRun) -> str:
        import trackio

        name = f"{run.name}-{run.run_id}"
        self._run = trackio.init(run.project, name, config=dict(run.config), resume="allow", embed=False)
        return f"trackio show --project {run.project}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class Library(NamedTuple):
    """A tracker that comes with TLT, and the package that it needs; the extra that installs it has the tracker's name."""

    make: Callable[[], Tracker]
    package: str


LIBRARIES: Mapping[str, Library] = {
    "wandb": Library(WandbTracker, "wandb"),
    "tensorboard": Library(TensorBoardTracker, "tensorboardX"),
    "trackio": Library(TrackioTracker, "trackio"),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError for a tracker that is unknown, or whose package is not installed; imports the user's own alone."""
    for name in names:
        if name in LIBRARIES:
            package = LIBRARIES[name].package
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:  # None: a folder ./wandb, as W&B itself leaves it, is no package
                raise UserError(f"tracking.use: {name} needs {package}, which is not installed; {how_to_install(name)}")
        elif not all(name.partition(":")):
            known = ", ".join(LIBRARIES)
            raise UserError(f"tracking.use: unknown tracker {name!r}; use {known}, or your own as 'package.module:Class'")
        else:
            get_object(f"tracking.use: {name}", name)


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Point(NamedTuple):
    """Figures of one step, name → number."""

    step: int
    values: Mapping[str, float]


Message = TrackedRun | Point | None
"""The run, first; then its figures; None: that was all."""


class Answer(NamedTuple):
    """What became of a message. text: where the figures can be seen, or in one line why they cannot be."""

    is_done: bool
    text: str = ""


def work(pipe: Connection[Answer, Message], name: str) -> None:
    """Runs in the tracker's process: does and answers what the pipe says until it ends."""
    tracker: Tracker | None = None
    with contextlib.suppress(EOFError):
        while True:
            message = pipe.recv()
            try:
                if tracker is None:
                    tracker = LIBRARIES[name].make() if name in LIBRARIES else get_object(name, name)()
                pipe.send(Answer(True, _obey(tracker, message)))
            except (Exception, SystemExit) as error:
                pipe.send(Answer(False, describe(error)))


def _obey(tracker: Tracker, message: Message) -> str:
    match message:
        case TrackedRun():
            return str(tracker.begin(message) or "")
        case Point(step, values):
            tracker.log(step, values)
        case None:
            tracker.finish()
    return ""

"""Where a run stands, from its files alone. Loads no torch."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from tlt.base.io.files import parse_json, read_file
from tlt.base.io.text import quoted
from tlt.base.types import UserError
from tlt.training.report.step_record import StepRecord, read_metrics
from tlt.training.saved.evaluations import Evaluation, read_evaluations

State = Literal["running", "finished", "stopped"]
NUM_RECENT = 5
_FAILURE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)$", re.MULTILINE)
_CHECKPOINT = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class RunStatus:
    """process: holds the folder's lock; None: none, or on another machine.
    written_at: Unix time of the latest change of a file.
    step: updates done.
    checkpoint: the newest's step.
    has_journal: responses of unfinished steps are kept.
    failures: (time, cause) of each restart.
    """

    folder: Path
    state: State
    process: int | None
    written_at: float | None
    step: int
    num_steps: int
    recent: Sequence[StepRecord]
    evaluations: Sequence[Evaluation]
    checkpoint: int | None
    has_journal: bool
    failures: Sequence[tuple[str, str]]

    @property
    def seconds_per_step(self) -> float | None:
        """Median of the latest steps."""
        return median(record.step_seconds for record in self.recent) if self.recent else None

    @property
    def seconds_left(self) -> float | None:
        """Without evaluations. None: unknown, no step left, or not running."""
        if self.state != "running" or self.seconds_per_step is None or self.step >= self.num_steps:
            return None
        return (self.num_steps - self.step) * self.seconds_per_step

    @property
    def on_resume(self) -> str:
        command = f"tlt train --resume {quoted(self.folder)}"
        if self.state == "running":
            return "refused while it runs"
        if self.state == "finished":
            return f"nothing is left; for more steps: {command} --run.num_steps {2 * self.num_steps or 100}"
        done = self.checkpoint or 0
        again = ""
        if self.step > done:
            steps = f"step {self.step}" if self.step == done + 1 else f"steps {done + 1} to {self.step}"
            kept = ", with the responses in the journal" if self.has_journal else ""
            again = f"; does {steps} again{kept}"
        begin = "begins again" if self.checkpoint is None else f"goes on after step {done}"
        return f"{begin}{again}: {command}"


def read_status(folder: Path) -> RunStatus:
    num_steps = _num_steps(folder)
    metrics = folder / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []
    names = (_CHECKPOINT.fullmatch(path.name) for path in folder.glob("checkpoints/*"))
    steps = [int(found[1]) for found in names if found]
    evaluations = read_evaluations(folder / "evaluations.jsonl")
    step = records[-1].step if records else 0
    state: State = "running" if is_locked(folder) else "stopped"
    if state == "stopped" and _is_finished(folder, num_steps, step, evaluations):
        state = "finished"
    return RunStatus(
        folder=folder,
        state=state,
        process=lock_holder(folder) if state == "running" else None,
        written_at=max(map(_changed_at, _files(folder)), default=None),
        step=step,
        num_steps=num_steps,
        recent=records[-NUM_RECENT:],
        evaluations=evaluations,
        checkpoint=max(steps, default=None),
        has_journal=any(folder.glob("journal/step-*/*")),
        failures=_failures(folder / "failures.log"),
    )


def _num_steps(folder: Path) -> int:
    try:
        num_steps = parse_json(read_file(folder / "config.json").decode())["run"]["num_steps"]
        if type(num_steps) is not int or not 0 <= num_steps < 10**18:
            raise ValueError("run.num_steps is no number of steps")
    except FileNotFoundError:
        raise UserError(
            f"{folder}: holds no run (no config.json); give the folder of one (run.out_dir)"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}/config.json: cannot be read ({error!r}); bring the run's file back"
        ) from None
    return num_steps


def _is_finished(folder: Path, num_steps: int, step: int, evaluations: Sequence[object]) -> bool:
    if not num_steps:
        return bool(evaluations)
    return step >= num_steps and (folder / "policy" / "config.json").exists()


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.iterdir() if path.is_file() and path.name != ".lock")
    yield from folder.glob("journal/step-*/*")
    yield from folder.glob("checkpoints/*")


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # the run has removed it since
        return 0.0


def _failures(log: Path) -> list[tuple[str, str]]:
    text = read_file(log).decode(errors="replace") if log.exists() else ""
    return _FAILURE.findall(text)


# ── the lock ────────────────────────────────────────────────────────────────────────────────────────────────


def is_locked(folder: Path) -> bool:
    """True also for a run on another machine, where the file system knows locks."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back when the file is closed
    except BlockingIOError:
        return True
    except OSError:  # no run has locked it, or this user may not ask
        return False
    return False


def lock_holder(folder: Path) -> int | None:
    """None: unknown on this machine."""
    try:
        inode = (folder / ".lock").stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    held = (words for line in lines if (words := line.split())[1] == "FLOCK")
    return next((int(words[4]) for words in held if words[5].endswith(f":{inode}")), None) or None

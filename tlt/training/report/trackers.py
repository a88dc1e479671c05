"""Trackers, of `accelerate.tracking` or the user's own, and each one's process, which imports this module."""

from __future__ import annotations

import contextlib
import html
import importlib
import importlib.util
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tlt.base.io.extras import how_to_install
from tlt.base.io.plugins import describe, get_object
from tlt.base.io.processes import this_python
from tlt.base.io.text import quoted
from tlt.base.types import UserError


@dataclass(frozen=True)
class TrackedRun:
    """run_id: the same in all attempts at this run.
    config: section → key → value.
    step: updates done by earlier attempts.
    """

    name: str
    project: str
    run_id: str
    folder: Path
    config: Mapping[str, Any]
    step: int


class Tracker(Protocol):
    """Receives a run's figures; the run goes on whatever a tracker raises and however long it takes.

    With a method `log_table(step, name, columns, rows)` it also receives the samples of run.show_samples.
    """

    def begin(self, run: TrackedRun) -> str:
        """Starts or continues the run. Returns where its figures are shown."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite figures of the policy after `step` updates. A step may be repeated."""
        ...

    def finish(self) -> None: ...


_SAME = ("wandb", "trackio", "mlflow", "swanlab", "comet_ml", "aim", "clearml", "dvclive")
NAMES = {**dict(zip(_SAME, _SAME, strict=True)), "tensorboard": "tensorboardX"}
"""accelerate's trackers → the package that each needs."""
EXTRAS = ("wandb", "tensorboard", "trackio")
RANK_VARIABLES = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


MLFLOW_TAG = "tlt.run_id"
"""Later attempts find a run in MLflow by this tag."""


class Accelerated:
    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self, run: TrackedRun) -> str:
        for variable in RANK_VARIABLES:  # inherited from a rank: accelerate would join its process group
            os.environ.pop(variable, None)
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState(cpu=True)  # its trackers log through it
        project, options = tracker_options(self.name, run)
        earlier = _earlier_in_mlflow(project, run.run_id) if self.name == "mlflow" else None
        if earlier is not None:
            options["run_id"] = earlier
        self._tracker = LOGGER_TYPE_TO_CLASS[self.name](project, **options)
        self._tracker.start()
        if self.name == "tensorboard":  # its hyperparameters would be a run of their own in each attempt
            config = json.dumps(run.config, indent=2)
            self._tracker.log(
                {"config": "\n".join(f"    {line}" for line in config.splitlines())}, step=run.step
            )
        elif earlier is None and "config" not in options:
            self._tracker.store_init_configuration(_flat(run.config))
        if self.name == "mlflow":
            importlib.import_module("mlflow").set_tag(MLFLOW_TAG, run.run_id)
        return self._where(run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._tracker.log(dict(values), step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """In TensorBoard as Markdown; libraries not named here get none."""
        cells = [[*row] for row in rows]
        match self.name:
            case "wandb" | "clearml":
                self._tracker.log_table(name, [*columns], cells, step=step)
            case "trackio":
                table = importlib.import_module("trackio").Table(columns=[*columns], data=cells)
                self._tracker.log({name: table}, step=step)
            case "tensorboard":
                self._tracker.log({name: _markdown(columns, rows)}, step=step)

    def finish(self) -> None:
        self._tracker.finish()

    def _where(self, run: TrackedRun) -> str:
        match self.name:
            case "wandb":
                at = self._tracker.tracker
                return (
                    f"offline; to upload: wandb sync {quoted(Path(at.dir).parent)}"
                    if at.offline
                    else at.url or ""
                )
            case "tensorboard":
                return f"tensorboard --logdir {quoted(run.folder / 'tensorboard')}"
            case "trackio":
                return f"trackio show --project {quoted(run.project)}"
        return ""


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        texts = (html.escape(str(cell)).replace("|", "&#124;").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(texts)} |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)])


def tracker_options(name: str, run: TrackedRun) -> tuple[str, dict[str, Any]]:
    """(project, the library's options).

    W&B continues the run of the same id, MLflow of the same tag, Trackio of the same name, which holds the
    id; TensorBoard hides later steps. The others begin a run for each attempt.
    """
    unique, resumed = f"{run.name}-{run.run_id}", {"resume": "allow", "config": dict(run.config)}
    match name:
        case "wandb":
            settings = {"console": "off", "silent": True}
            where = {"dir": os.environ.get("WANDB_DIR", str(run.folder)), "settings": settings}
            return run.project, {"name": run.name, "id": run.run_id, **resumed, **where}
        case "tensorboard":
            return "tensorboard", {"logging_dir": str(run.folder), "purge_step": run.step + 1}
        case "trackio":
            return run.project, {"name": unique, **resumed, "embed": False}
        case "mlflow":
            return run.project, {"run_name": unique}
        case "swanlab":
            return run.project, {"experiment_name": unique}
        case "clearml":
            return run.project, {"task_name": unique}
        case "aim":
            return unique, {"logging_dir": str(run.folder), "experiment": run.project}
        case "dvclive":
            return run.project, {"dir": str(run.folder / "dvclive"), "resume": run.step > 0}
    return run.project, {}


def _earlier_in_mlflow(project: str, run_id: str) -> str | None:
    """A killed attempt's run would stay RUNNING."""
    found = importlib.import_module("mlflow").search_runs(
        experiment_names=[os.environ.get("MLFLOW_EXPERIMENT_NAME", project)],
        filter_string=f"tags.`{MLFLOW_TAG}` = '{run_id}'",
        output_format="list",
    )
    return found[0].info.run_id if found else None


def _flat(config: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    keys = {f"{name}.{key}": value for name, section in config.items() for key, value in section.items()}
    return {key: value if isinstance(value, int | float) else str(value) for key, value in keys.items()}


def check_trackers(names: Sequence[str]) -> None:
    """UserError for unknown trackers and missing packages. Imports only the user's own trackers."""
    for name in names:
        if name in NAMES:
            if missing := [package for package in (NAMES[name], "accelerate") if not _is_installed(package)]:
                needs = " and ".join(missing)
                remedy = how_to_install(name) if name in EXTRAS else f"pip install {' '.join(missing)}"
                raise UserError(f"tracking.use: {name} needs {needs}, which is not installed; {remedy}")
            if name == "wandb":
                _refuse_without_login()
        elif not all(name.partition(":")):
            known = ", ".join(sorted(NAMES))
            raise UserError(
                f"tracking.use: unknown tracker {name!r}; use {known}, or your own as 'package.module:Class' "
                "or 'FILE.py:Class'"
            )
        else:
            get_object(f"tracking.use: {name}", name)


def _refuse_without_login() -> None:
    """Without a key W&B would wait in vain. Where it looks for one differs by version."""
    asked = subprocess.run(
        [*this_python(), "-c", "import wandb; wandb.login(verify=False)"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        _, _, why = asked.stderr.strip().rpartition("\n")[2].partition(": ")
        remedy = "run wandb login, set WANDB_API_KEY, or keep its files here with WANDB_MODE=offline"
        raise UserError(f"tracking.use: wandb cannot log in ({why}); {remedy}")


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # W&B's folder ./wandb, no package, has no origin


# ── the process ─────────────────────────────────────────────────────────────────────────────────────────────


class Point(NamedTuple):
    step: int
    values: Mapping[str, float]


class TableOf(NamedTuple):
    step: int
    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


Message = TrackedRun | Point | TableOf | None


class TrackerReply(NamedTuple):
    """text: where the figures can be seen, or why the message failed."""

    is_done: bool
    text: str = ""


def work(pipe: Connection[TrackerReply, Message], name: str) -> None:
    tracker: Tracker | None = None
    with contextlib.suppress(EOFError):
        while True:
            message = pipe.recv()
            try:
                if tracker is None:
                    tracker = Accelerated(name) if name in NAMES else get_object(name, name)()
                pipe.send(TrackerReply(True, _obey(tracker, message)))
            except (Exception, SystemExit) as error:
                pipe.send(TrackerReply(False, describe(error)))


def _obey(tracker: Tracker, message: Message) -> str:
    match message:
        case TrackedRun():
            return str(tracker.begin(message) or "")
        case Point(step, values):
            tracker.log(step, values)
        case TableOf():
            if (log_table := getattr(tracker, "log_table", None)) is not None:
                log_table(*message)
        case None:
            tracker.finish()
    return ""

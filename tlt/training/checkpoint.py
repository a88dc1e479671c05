"""Checkpoints of a run: everything the rest of it depends on, whole or not at all, written beside it.

    checkpoints/step-00000020/   state.json · policy.safetensors · drafter.safetensors · training.pt

    run      ── copy ─▶ next step ───────────────────────────▶ copy ─▶ …
    thread           └▶ write ─▶ flush ─▶ rename ─▶ remove older        one in flight; what fails is raised by the next save

A directory appears under its name only when it is complete; the newest one is where a run resumes. It holds only what
trains: embedding and head of a drafter are the policy's, and whatever else of it is frozen comes from its own folder.
Weights are kept in the precision they are trained in, so that a resumed run is the same run.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tlt.files import replace_folder
from tlt.models.hf_weights import save_tensors
from tlt.types import UserError

_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class RunState:
    """step: updates done.  drafter_version: publications of the drafter."""

    step: int
    drafter_version: int


@dataclass(frozen=True)
class Checkpoint:
    """policy, drafter: the tensors that train, by name; None: no drafter does. training: optimizer states and counters, of
    kinds that torch.save keeps."""

    state: RunState
    policy: Mapping[str, Tensor]
    drafter: Mapping[str, Tensor] | None
    training: Mapping[str, Any]

    def copy(self) -> Checkpoint:
        """Returns a copy on the CPU, which further training does not change."""
        return replace(self, policy=_copy(self.policy), drafter=_copy(self.drafter), training=_copy(self.training))


class CheckpointWriter:
    """Writes checkpoints into `folder` off the critical path. Close it with `wait`, or the last failure stays unsaid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._step = 0

    def save(self, checkpoint: Checkpoint) -> None:
        """Returns as soon as everything is copied. Raises what became of the one before, as `wait` does."""
        self.wait()
        self._step = checkpoint.state.step
        self._thread = threading.Thread(target=self._write, args=(checkpoint.copy(),), name="checkpoint writer")
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is in flight. Raises UserError when it could not be written: nearly always a full disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            kept = latest_checkpoint(self.folder)
            left = "there is none before it" if kept is None else f"the one before, {kept}, is whole"
            raise UserError(f"the checkpoint of step {self._step} is not written ({error}); {left}") from error

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            save_checkpoint(self.folder, checkpoint)
        except BaseException as error:  # a thread's exception reaches nobody: `wait` raises it
            self._error = error


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Writes a checkpoint, and then removes the older ones and what killed writers have left. A newer one is not this run's and
    stays: a run begins at the newest, and one process at a time runs in a folder. Whoever wants to go back moves it away."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{checkpoint.state.step:08d}"
    with replace_folder(final) as partial:
        for name, tensors in (("policy", checkpoint.policy), ("drafter", checkpoint.drafter)):
            if tensors is not None:
                save_tensors(partial / f"{name}.safetensors", tensors)
        _save_pickled(partial / "training.pt", dict(checkpoint.training))
        (partial / "state.json").write_text(json.dumps(asdict(checkpoint.state)))
    for old in (*(other for other in _checkpoints(folder) if other < final), *folder.glob(".step-*")):
        shutil.rmtree(old)
    return final


def _save_pickled(path: Path, value: dict[str, Any]) -> None:
    """Writes what torch.load reads. Raises OSError where it cannot be written; torch.save hides it behind its own error."""
    try:
        with path.open("wb") as file:
            torch.save(value, file)
    except RuntimeError as error:
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def latest_checkpoint(folder: Path) -> Path | None:
    return max(_checkpoints(folder), default=None)


def load_checkpoint(path: Path, device: torch.device) -> Checkpoint:
    written = json.loads((path / "state.json").read_text())
    state = RunState(written["step"], written["drafter_version"])  # older runs wrote more
    drafter_file = path / "drafter.safetensors"
    drafter = load_file(drafter_file, device=str(device)) if drafter_file.exists() else None
    training = torch.load(path / "training.pt", map_location=device, weights_only=True)
    return Checkpoint(state, load_file(path / "policy.safetensors", device=str(device)), drafter, training)


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []


def _copy(value: Any) -> Any:
    """Returns the same containers with copies of their tensors, on the CPU."""
    match value:
        case Tensor():
            return value.detach().to("cpu", copy=True)
        case Mapping():
            return {key: _copy(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_copy(item) for item in value)
    return value

"""The run in a folder: id and inputs, from the newest checkpoint, else from the journal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tlt.base.config.schema import Config
from tlt.training.report.tracking import read_run_id, run_id
from tlt.training.saved.inputs import Inputs, code_of
from tlt.training.saved.journal import read_header
from tlt.training.saved.manifest import latest_checkpoint, read_manifest

_INPUTS = TypeAdapter(Inputs)


@dataclass(frozen=True)
class Begun:
    run: str
    inputs: Inputs
    when: str
    """When the run had these inputs, for messages."""


def read_begun(folder: Path, checkpoint: Path | None = None) -> Begun | None:
    """None: no run is known. UserError if the checkpoint is damaged.

    checkpoint: default: the newest.
    """
    checkpoint = checkpoint or latest_checkpoint(folder / "checkpoints")
    if checkpoint is not None:
        manifest = read_manifest(checkpoint)
        return Begun(manifest.run, manifest.inputs, f"at its checkpoint of step {manifest.step}")
    header = read_header(folder / "journal")
    if header is None or read_run_id(folder) not in (None, header["run"]):  # another run's journal
        return None
    try:
        return Begun(str(header["run"]), _INPUTS.validate_python(header["inputs"]), "when its journal began")
    except ValidationError:
        return None


def identify_run(folder: Path, config: Config, inputs: Inputs, say: Callable[[str], None]) -> str:
    """New or resumed. UserError if the run began with other inputs. `say` gets a line for each changed module
    of reward code."""
    if (begun := read_begun(folder)) is None:
        return run_id(folder, say=say)
    inputs.refuse_other(begun.inputs, config, begun.when)
    files = code_of(config)
    for module in inputs.changed_code(begun.inputs):
        rest = "from here on it scores as it says now, and the run is no longer the one of before"
        say(f"{files[module]}: is not as it was {begun.when}; {rest}")
    return run_id(folder, begun.run, say)

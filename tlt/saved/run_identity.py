"""What a folder says of the run that has begun in it, and who goes on with it is held to: its id and its
inputs, by the checkpoint that it would go on from, or by its journal where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tlt.config.schema import Config
from tlt.report.tracking import read_run_id, run_id
from tlt.saved.inputs import Inputs, code_of
from tlt.saved.journal import read_header
from tlt.saved.manifest import latest_checkpoint, read_manifest

_INPUTS = TypeAdapter(Inputs)


@dataclass(frozen=True)
class Begun:
    """run: its id.  inputs: what it computes from.  when: it was so, for people."""

    run: str
    inputs: Inputs
    when: str


def read_begun(folder: Path, checkpoint: Path | None = None) -> Begun | None:
    """Returns what is known of the run in a folder; None: nothing. checkpoint: the one to go on from;
    None: the newest. Raises UserError where that is damaged."""
    checkpoint = checkpoint or latest_checkpoint(folder / "checkpoints")
    if checkpoint is not None:
        manifest = read_manifest(checkpoint)
        return Begun(manifest.run, manifest.inputs, f"at its checkpoint of step {manifest.step}")
    header = read_header(folder / "journal")
    if header is None or read_run_id(folder) not in (
        None,
        header["run"],
    ):  # another run's journal says nothing of this one
        return None
    try:
        return Begun(str(header["run"]), _INPUTS.validate_python(header["inputs"]), "when its journal began")
    except ValidationError:
        return None


def identify_run(folder: Path, config: Config, inputs: Inputs, say: Callable[[str], None]) -> str:
    """Returns the id of the run in a folder, one that begins or goes on. Raises UserError where these are
    not the inputs of the run that has begun there; `say` is told of reward code that is another."""
    begun = read_begun(folder)
    if begun is None:
        return run_id(folder, say=say)
    inputs.refuse_other(begun.inputs, config, begun.when)
    files = code_of(config)
    for module in inputs.changed_code(begun.inputs):
        rest = "from here on it scores as it says now, and the run is no longer the one of before"
        say(f"{files[module]}: is not as it was {begun.when}; {rest}")
    return run_id(folder, begun.run, say)

"""Names of local Hugging Face files, and their JSON. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt.base.io.files import parse_json, read_file
from tlt.base.io.hub import COMPANIONS
from tlt.base.io.text import quoted
from tlt.base.types import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
COUNTS = "token_counts.json"
"""Counts of sampled tokens, in a drafter's folder."""
_DIGITS = "[0-9]" * 5
CHECKPOINT_FILES = ("config.json", WEIGHTS, f"model-{_DIGITS}-of-{_DIGITS}.safetensors", INDEX, *COMPANIONS)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
DRAFTER_FILES = ("config.json", WEIGHTS, COUNTS)


def existing_directory(path: Path | str) -> Path:
    """Raises UserError unless the path is a folder without pipes and devices, on which a reader would
    hang."""
    directory = Path(path)
    if not directory.is_dir():
        interrupted = directory.with_name(f".{directory.name}.old") if directory.name else directory
        if interrupted.is_dir():
            raise UserError(
                f"{directory}: is missing, a save was interrupted; rename {interrupted} to {directory.name}"
            )
        remedy = f"give a local checkpoint (hf download MODEL --local-dir {quoted(directory)})"
        raise UserError(f"{directory}: is no directory; {remedy}")
    for entry in sorted(directory.iterdir()):
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise UserError(f"{entry}: is a pipe or a device, no file; put the file in its place")
    return directory


def read_json(file: Path) -> dict[str, Any]:
    """Raises UserError for a missing file, or anything but a JSON object."""
    if not file.exists():
        raise UserError(f"{file}: is missing; give a directory with a whole Hugging Face checkpoint")
    try:
        value = parse_json(read_file(file).decode())
    except (OSError, ValueError) as error:  # the error names no file
        raise UserError(f"{file}: is no JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: holds a JSON {type(value).__name__}, not an object; download it again")
    return value


def write_hf_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

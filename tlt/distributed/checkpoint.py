"""Checkpoints of a run: everything the rest of it depends on, whole or not at all.

    checkpoints/step-00000020/   state.json · policy.safetensors · drafter.safetensors · training.pt

A directory appears under its name only when it is complete; the newest one is where a run resumes. Weights are kept in
the precision they are trained in, so that a resumed run is the same run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class RunState:
    """step: updates done. config_hash identifies the configuration that did them."""

    step: int
    drafter_version: int
    config_hash: str


def save_checkpoint(
    folder: Path,
    state: RunState,
    policy: Mapping[str, Tensor],
    drafter: Mapping[str, Tensor] | None,
    training: Mapping[str, Any],
) -> Path:
    """Writes a checkpoint and removes the older ones. `training` is what torch.save can keep: optimizer states and counters."""
    folder.mkdir(parents=True, exist_ok=True)
    final, partial = folder / f"step-{state.step:08d}", folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, tensors in (("policy", policy), ("drafter", drafter)):
        if tensors is not None:
            save_file(
                {key: value.detach().cpu().contiguous() for key, value in tensors.items()}, partial / f"{name}.safetensors"
            )
    torch.save(dict(training), partial / "training.pt")
    (partial / "state.json").write_text(json.dumps(asdict(state)))
    for file in partial.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for other in _checkpoints(folder):
        if other != final:
            shutil.rmtree(other)
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    return max(_checkpoints(folder), default=None)


def load_checkpoint(
    path: Path, device: torch.device
) -> tuple[RunState, dict[str, Tensor], dict[str, Tensor] | None, dict[str, Any]]:
    """(state, policy, drafter or None, training)"""
    state = RunState(**json.loads((path / "state.json").read_text()))
    drafter_file = path / "drafter.safetensors"
    drafter = load_file(drafter_file, device=str(device)) if drafter_file.exists() else None
    training = torch.load(path / "training.pt", map_location=device, weights_only=True)
    return state, load_file(path / "policy.safetensors", device=str(device)), drafter, training


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []

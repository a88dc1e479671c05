"""Which checkpoints stay: older ones and leftovers go, newer ones step aside."""

from __future__ import annotations

import os
import re
from itertools import count
from pathlib import Path

from tlt.base.io.files import remove_own
from tlt.base.types import UserError
from tlt.training.saved.manifest import MANIFEST, all_checkpoints, folder_of, read_manifest, verify_files

_REPLACED = re.compile(r"\.(step-\d{8})\.old")
_LEFTOVER = ".step-" + "[0-9]" * 8 + ".*"
CHECKPOINT_FILES = (MANIFEST, "rank-" + "[0-9]" * 5 + ".json", "rank-" + "[0-9]" * 5 + ".safetensors")


def remove_older(folder: Path, step: int, keep: int) -> None:
    """Keeps the `keep` newest whole ones up to this step. A newer checkpoint is not this run's and stays."""
    left = keep
    for path in all_checkpoints(folder):
        if path.name > folder_of(folder, step).name:
            continue
        if left <= 0:
            path.rename(path.with_name(f".{path.name}.gone"))  # so that no half has a checkpoint's name
        else:
            left -= _has_manifest(path)
    for leftover in folder.glob(_LEFTOVER):
        discard(leftover)


def clear_leftovers(folder: Path) -> None:
    """A checkpoint that was moved away and not replaced comes back."""
    for leftover in folder.glob(_LEFTOVER):
        match = _REPLACED.fullmatch(leftover.name)
        if match is not None and not (folder / match[1]).exists():
            leftover.rename(folder / match[1])
        else:
            discard(leftover)


def go_back_to(path: Path) -> list[Path]:
    """Makes this checkpoint the newest; returns newer ones' new paths. UserError if it is not whole."""
    manifest = read_manifest(path)
    verify_files(path, manifest, manifest.files)
    aside = []
    for newer in (other for other in all_checkpoints(path.parent) if other.name > path.name):
        aside.append(newer.rename(_free_name(newer, "aside")))
    return aside


def discard(path: Path) -> None:
    """Removes a renamed checkpoint; foreign files stay."""
    if path.is_dir() and not path.is_symlink() and not remove_own(path, CHECKPOINT_FILES):
        path.rename(_free_name(path.with_name(path.name[1:].partition(".")[0]), "left"))


def _free_name(path: Path, ending: str) -> Path:
    names = (path.with_name(f"{path.name}.{ending}{f'-{n}' if n > 1 else ''}") for n in count(1))
    return next(name for name in names if not os.path.lexists(name))


def _has_manifest(path: Path) -> bool:
    try:
        read_manifest(path)
    except UserError:
        return False
    return True

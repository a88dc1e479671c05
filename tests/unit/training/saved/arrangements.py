"""Folders as users have them: where a run's folder, its model, drafter and data lie, and what else lies
there."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INPUTS = {"model.path": "model", "drafter.path": "drafter", "task.data": "data.jsonl"}
_NAMES = (
    *("policy", "best", "adapter", "drafter", "journal", "responses", "checkpoints"),
    *("config.json", "console.log", "metrics.jsonl", "evaluations.jsonl", "timeline.json", ".lock"),
    *("timeline.rank0.jsonl", "tracking.json", ".policy.new", ".drafter.old"),
)
_INSIDE = {
    **dict.fromkeys(
        ("policy", "best", ".policy.new"), ("notes.txt", "config.json", "model-mine.safetensors")
    ),
    **dict.fromkeys(("drafter", ".drafter.old", "adapter"), ("notes.txt", "model.safetensors", "a b/c.txt")),
    "journal": ("2026.md", "step-1/diary.md", "step-00000000/diary.md"),
    "responses": ("rollout-mine.jsonl", "evaluation-00000000.txt"),
    "checkpoints": (".step-notes", "step-00000001/notes.txt", "notes/step-00000001"),
}


@dataclass(frozen=True)
class Arrangement:
    """A user's folders before a run.

    out: the run's folder, as the user writes it.
    inputs: model, drafter and data by key, as the user writes them.
    """

    root: Path
    out: Path
    inputs: dict[str, Path]

    def digest(self) -> dict[str, str]:
        """Returns a digest of every file and the target of every link, by path."""
        return {str(path): _digest(path) for path in sorted(self.root.rglob("*")) if not path.is_dir()}


def _digest(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def arrange(root: Path, sources: dict[str, Path], draw: random.Random) -> Arrangement:
    """Copies the inputs into a new folder in an arrangement that is drawn, with files of the user's under
    names that a run writes.

    sources: a model, a drafter and data by key.
    """
    root.mkdir()
    out = root / draw.choice(("out", "my runs/the first", "a;b"))
    inputs: dict[str, Path] = {}
    for key, name in INPUTS.items():
        homes = [
            root,
            root,
            root / "things of mine",
            out,
            *(path for path in inputs.values() if path.is_dir()),
        ]
        home, named = draw.choice(homes), draw.choice((name, name, draw.choice(_NAMES)))
        if key == "task.data" and not named.endswith((".json", ".jsonl")):
            named = name
        inputs[key] = _place(sources[key], home / named, draw)
    where = draw.random()
    if where < 0.15:
        out = draw.choice([path for path in inputs.values() if path.is_dir()])
    elif where < 0.25:
        out = draw.choice([path for path in inputs.values() if path.is_dir()]) / "runs"
    elif where < 0.4:
        out = root
    if where < 0.7:
        scatter(out, draw, num=draw.randrange(3))
    if draw.random() < 0.2 and out.is_dir():
        link = root / "link"
        link.symlink_to(out)
        out = link
    if draw.random() < 0.2:
        out = out / ".." / out.name
    return Arrangement(root, out, inputs)


def scatter(folder: Path, draw: random.Random, num: int, names: Sequence[str] = _NAMES) -> None:
    """Writes files of the user's into a folder, under names that a run writes."""
    for name in draw.sample(names, num):
        path = folder / name / draw.choice(_INSIDE[name]) if name in _INSIDE else folder / name
        if path.exists():
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"mine: {name}\n")
        except OSError:  # something else of the user's is in its place
            continue
        path.chmod(draw.choice((0o644, 0o644, 0o444)))


def _place(source: Path, target: Path, draw: random.Random) -> Path:
    """Copies an input to its place, or puts a link there; another name if something lies there already."""
    while os.path.lexists(target):
        target = target.with_name(f"another {target.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = shutil.copytree if source.is_dir() else shutil.copyfile
    if draw.random() < 0.2:
        away = target.with_name(f"real {target.name}")
        copy(source, away)
        target.symlink_to(away.name)
    else:
        copy(source, target)
    return target

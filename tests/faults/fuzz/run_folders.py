"""A run goes on in a folder in which something is damaged, of another kind, missing or too much."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from random import Random

from tests.faults.fuzz.case import Case, Place
from tests.faults.mutations import ODD, damaged, mutated
from tests.faults.workspace import ROOT

STRANGERS = (
    "timeline.rankx.jsonl", "timeline.rank99999999999999999999.jsonl", "timeline.rank-1.jsonl",
    "timeline.rank1.jsonl", "journal/step-x/replica-00000.0", "journal/step-00000002/replica-x",
    "journal/step-00000002/replica-00000.x", "journal/step-00000002/replica-00000.99999999999999999999",
    "journal/x", "journal/step-00000099/replica-00000.0", "checkpoints/step-x", "checkpoints/step-",
    "checkpoints/step-00000002.new", "checkpoints/step-99999999999999999999",
    "checkpoints/.step-00000003.new", "checkpoints/step-00000001.aside", "responses/x",
    "responses/step-x.jsonl", "failures.log", ".lock", "best/x", "policy/model.safetensors",
    "drafter/config.json", "adapter", "tracking.log", "best.new", "policy.new",
)  # fmt: skip
"""Names that a run's folder has, or might seem to have."""


def run_folders(place: Place, rng: Random, ranks: int = 1) -> Case:
    """What the folder of a run holds is damaged, here and there, and the run is to go on."""
    run = place.copy(place.sound.run)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _damage(run, rng)
    environ = {"PYTHONPATH": os.pathsep.join([str(place.sound.tasks), str(ROOT)])}
    checkpoints = sorted(run.glob("checkpoints/step-*"))
    named = rng.choice(checkpoints) if checkpoints and rng.random() < 0.15 else run
    resume: tuple[str, ...] = ("train", "--resume", str(named), "--run.num_ranks", str(ranks))
    if rng.random() < 0.15:
        config = str(place.sound.tasks / "run.toml")
        resume = ("train", config, "--run.out_dir", str(run), *rng.choice(((), ("--resume", "auto"))))
    return Case(resume, trains=True, environ=environ)


def _damage(run: Path, rng: Random) -> None:
    found = sorted(run.rglob("*")) if run.is_dir() else []
    if not found:
        return
    # Of a kind that occurs often, such as responses, not more than of one that occurs once.
    path = rng.choice([path for path in found if path.parent == run] if rng.random() < 0.5 else found)
    match rng.randrange(10):
        case 0 | 1 | 2 | 3 if path.is_file() and not path.is_symlink():
            path.write_bytes(_odd_text(path, rng))
        case 4:
            _remove(path)
        case 5 | 6:
            _remove(path)
            _put_something(path, rng)
        case 7 | 8:
            stranger = run / rng.choice(STRANGERS)
            if stranger.parent.is_dir() and not os.path.lexists(stranger):
                _put_something(stranger, rng)
        case _:
            path.chmod(rng.choice((0, 0o444, 0o555)))


def _odd_text(path: Path, rng: Random) -> bytes:
    data = path.read_bytes()
    match rng.randrange(4):
        case 0 if path.suffix in (".json", ".jsonl"):
            texts = (
                [data.decode(errors="replace")]
                if path.suffix == ".json"
                else data.decode(errors="replace").splitlines()
            )
            return "".join(_mutated_json(text, rng) + "\n" for text in texts).encode()
        case 1:
            return rng.choice(
                (b"", b"\n", data * 2, data + b"{", data[: len(data) // 2], b"\0" * 4096, b"null", b"[]")
            )
        case 2:
            return data + (json.dumps(rng.choice(ODD)) + "\n").encode()
        case _:
            return damaged(data, rng)


def _mutated_json(text: str, rng: Random) -> str:
    try:
        return json.dumps(mutated(json.loads(text), rng))
    except ValueError:
        return text


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _put_something(path: Path, rng: Random) -> None:
    """Puts something in a place: a file, a folder, a link to nowhere or to itself, a socket, a device that
    is full."""
    match rng.randrange(7):
        case 0 | 1:
            path.write_bytes(rng.choice((b"", b"\xff\xfe\0x", b"{}\n", b"[]\n", b"x")))
        case 2 | 3:
            path.mkdir()
            if rng.random() < 0.5:
                (path / "x").write_text("x")
        case 4:
            path.symlink_to(
                rng.choice((path, path.parent / "no-such-file", Path("/dev/full"), Path("/dev/null")))
            )
        case 5 if len(str(path)) < 100:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(path))
        case _:
            path.symlink_to("/no/such/folder/at/all")

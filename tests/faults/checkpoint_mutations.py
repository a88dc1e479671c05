"""Checkpoints that were damaged, exchanged or edited, at random but seeded: each is found out, in one line,
or does no harm.

    checkpoints of steps 10 and 20, by two ranks ─▶ one mutation ─▶ 1, 2 or 3 ranks resume from step 20
        ├ one line with file and remedy         detected: the user chooses step 10, judged in the same way
        ├ resumed with exactly what was saved   harmless
        └ anything else                         a failure

    python -m tests.faults.checkpoint_mutations --out benchmarks/results/checkpoint-mutations --num 2000

A forged manifest is one whose digest was brought up to date with the edit. What the manifest alone says,
the counters, the run's id and the package's version, is left out of that: only a secret key could protect
it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.faults.mutations import DAMAGES, damage, exchange, mutated
from tests.faults.report import tally
from tlt.base.types import UserError
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.models.adam import trained_tensors
from tlt.models.decoder import ModelConfig, Transformer
from tlt.training.ranks.world import World
from tlt.training.saved.checkpoint import Checkpoint, CheckpointWriter, find_checkpoint, load_checkpoint
from tlt.training.saved.manifest import MANIFEST, read_manifest
from tlt.training.saved.retention import go_back_to

SHAPE = ModelConfig("llama", 61, 16, 24, 2, 2, 1, 8, max_positions=64)
STEPS = (10, 20)
NUM_RANKS = 2


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint was given. own: by rank."""

    tensors: dict[str, Tensor]
    counters: dict[str, Any]
    own: list[dict[str, Any]]


def make_tensors() -> dict[str, Tensor]:
    """All that trains in a small run: policy and drafter with their moments."""
    tensors: dict[str, Tensor] = {}
    for kind, model in (("policy", Transformer(SHAPE)), ("drafter", new_model(drafter_shape(SHAPE)))):
        tensors |= trained_tensors(
            kind, torch.optim.AdamW(model.parameters()), dict(model.named_parameters())
        )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def make_worlds(num_ranks: int) -> list[World]:
    store = dist.HashStore()
    return [World(rank, num_ranks, rank, torch.device("cpu"), store, None) for rank in range(num_ranks)]


def save_run(folder: Path, seed: int = 0) -> dict[int, Saved]:
    """Writes the checkpoints of both steps, and returns what they hold, by step."""
    generator, saved = torch.Generator().manual_seed(seed), {}
    writers = [CheckpointWriter(folder, world) for world in make_worlds(NUM_RANKS)]
    for step in STEPS:
        tensors = {
            name: torch.randn(tensor.shape, generator=generator) for name, tensor in make_tensors().items()
        }
        counters = {
            "policy": {"next_step": step},
            "drafter": {"version": step // 2, "watch": {"level": step / 7}},
        }
        own = [
            {"tuner": {"cells": [[rank, 0.1 / step]]}, "texts": list(range(rank, 50 + step))}
            for rank in range(NUM_RANKS)
        ]
        for rank, writer in enumerate(writers):
            writer.save(Checkpoint(step, "run", tensors, counters, own[rank]))
        for writer in writers:
            writer.wait()
        saved[step] = Saved(tensors, counters, own)
    return saved


# ── mutations ───────────────────────────────────────────────────────────────────────────────────────────────


def _folders(folder: Path) -> tuple[Path, Path]:
    """Returns the older checkpoint and the newer one."""
    older, newer = (folder / f"step-{step:08d}" for step in STEPS)
    return older, newer


def _file(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(_folders(folder)[1].iterdir()))


def _damage(kind: str) -> Mutation:
    return lambda folder, rng: damage(_file(folder, rng), kind, rng)


def remove(folder: Path, rng: random.Random) -> None:
    _file(folder, rng).unlink()


def make_folder(folder: Path, rng: random.Random) -> None:
    file = _file(folder, rng)
    file.unlink()
    file.mkdir()


def add_stray_file(folder: Path, rng: random.Random) -> None:
    place = rng.choice((folder, _folders(folder)[1]))
    (place / rng.choice(("rank-00007.safetensors", "notes.txt", ".nfs0001", "training.pt"))).write_bytes(
        rng.randbytes(9)
    )


def exchange_between_steps(folder: Path, rng: random.Random) -> None:
    file = _file(folder, rng)
    exchange(_folders(folder)[0] / file.name, file)


def exchange_between_ranks(folder: Path, rng: random.Random) -> None:
    kind = rng.choice(("json", "safetensors"))
    one, other = (_folders(folder)[1] / f"rank-{rank:05d}.{kind}" for rank in range(NUM_RANKS))
    exchange(one, other)


def exchange_folders(folder: Path, rng: random.Random) -> None:
    exchange(*_folders(folder))


def rename_folder(folder: Path, rng: random.Random) -> None:
    _folders(folder)[1].rename(folder / f"step-{rng.randint(STEPS[-1] + 1, 10**7):08d}")


def copy_older(folder: Path, rng: random.Random) -> None:
    older, newer = _folders(folder)
    shutil.rmtree(newer)
    shutil.copytree(older, newer)


def edit_manifest(folder: Path, rng: random.Random) -> None:
    file = _folders(folder)[1] / MANIFEST
    described = json.loads(file.read_text())
    if rng.random() < 0.1:
        described = mutated(described, rng)
    else:
        described["manifest"] = mutated(described["manifest"], rng)
    file.write_text(json.dumps(described))


def forge_manifest(folder: Path, rng: random.Random) -> None:
    file = _folders(folder)[1] / MANIFEST
    manifest = dataclasses.asdict(read_manifest(file.parent))
    told = {key: manifest.pop(key) for key in ("counters", "run", "tlt")}
    forged = None
    while not isinstance(forged, dict):
        forged = mutated(manifest, rng)
    body = {**forged, **told}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({"manifest": body, "sha256": digest}, sort_keys=True))


Mutation = Callable[[Path, random.Random], None]
KINDS: dict[str, Mutation] = {
    **{kind: _damage(kind) for kind in DAMAGES},
    "a file missing": remove,
    "a folder in a file's place": make_folder,
    "a stray file": add_stray_file,
    "exchanged between steps": exchange_between_steps,
    "exchanged between ranks": exchange_between_ranks,
    "folders exchanged": exchange_folders,
    "a folder renamed": rename_folder,
    "an older one copied over": copy_older,
    "manifest edited": edit_manifest,
    "manifest forged": forge_manifest,
}


# ── what becomes of them ────────────────────────────────────────────────────────────────────────────────────


def judge(folder: Path, saved: Saved, num_ranks: int) -> str:
    """Returns "detected", "harmless", or what went wrong when a run of so many ranks goes on from the
    newest checkpoint."""
    try:
        found = find_checkpoint(folder, make_worlds(1)[0])
        assert found is not None
        path, manifest = found
        known: list[dict[str, Any]] = []
        for world in make_worlds(num_ranks):
            tensors = {name: torch.zeros_like(tensor) for name, tensor in saved.tensors.items()}
            own = load_checkpoint(path, manifest, tensors, world)
            known += own if world.rank < NUM_RANKS else []
            if not all(torch.equal(tensors[name], saved.tensors[name]) for name in tensors):
                return "silent: other tensors"
    except UserError as error:
        return _judge_message(str(error), folder)
    except Exception as error:  # what a user would see as a traceback: the very thing to be found
        return f"traceback: {error!r}"
    same = manifest.counters == saved.counters and all(one in known for one in saved.own)
    return "harmless" if same else "silent: other counters"


def _judge_message(message: str, folder: Path) -> str:
    names_it = message.startswith(str(folder / "step-"))
    has_remedy = "; " in message and ("--resume" in message or "new run" in message or "version" in message)
    return "detected" if names_it and has_remedy and "\n" not in message else f"unclear: {message}"


def try_one(folder: Path, saved: dict[int, Saved], kind: str, rng: random.Random) -> tuple[str, str]:
    """Mutates a copy of the run's checkpoints. Returns what became of the newest, and of the older one
    that the user chooses then ("": there was no need)."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        copy = Path(place) / "checkpoints"
        shutil.copytree(folder, copy)
        KINDS[kind](copy, rng)
        num_ranks = rng.randint(1, 3)
        newest = judge(copy, saved[STEPS[-1]], num_ranks)
        if newest != "detected":
            return newest, ""
        try:
            go_back_to(copy / f"step-{STEPS[0]:08d}")
        except UserError as error:
            return newest, _judge_message(str(error), copy)
        return newest, judge(copy, saved[STEPS[0]], num_ranks)


def play(num: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yields what became of every mutation, and of the older checkpoint where the newest was detected."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "checkpoints"
        saved = save_run(folder)
        for number in range(num):
            kind = list(KINDS)[number % len(KINDS)]
            newest, older = try_one(folder, saved, kind, random.Random(f"{seed}/{number}"))
            yield kind, newest
            if older:
                yield kind, f"older one {older}"


GOOD = ("detected", "harmless", "older one detected", "older one harmless")

if __name__ == "__main__":
    sys.exit(tally("checkpoint_mutations", __doc__, play, GOOD))

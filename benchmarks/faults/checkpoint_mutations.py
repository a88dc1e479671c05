"""Checkpoints that were damaged, exchanged or edited, at random but seeded: each is found out, in one line, or does no harm.

    two checkpoints, steps 10 and 20, written by two ranks ─▶ one mutation ─▶ does a run of 1, 2 or 3 ranks go on from step 20?
                                                                               ├ one line with file and remedy     detected
                                                                               ├ with exactly what was saved       harmless
                                                                               └ else                              a failure
    where it was detected: the user chooses step 10 ─▶ the same three questions

    python -m benchmarks.faults.checkpoint_mutations --out benchmarks/results/checkpoint-mutations.json --num 2000 --seed 7

A forged manifest is one whose digest was brought up to date with the edit. What the manifest alone says, the counters, the
run's id and the package's version, is left out of that: only a secret key could protect it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlt.distributed.world import World
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.models.adam import trained_tensors
from tlt.models.decoder import ModelConfig, Transformer
from tlt.training.saved.checkpoint import Checkpoint, CheckpointWriter, find_checkpoint, go_back_to, load_checkpoint
from tlt.training.saved.manifest import MANIFEST, read_manifest
from tlt.types import UserError

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
    for kind, model in (("policy", Transformer(SHAPE)), ("drafter", DraftModel(drafter_shape(SHAPE)))):
        tensors |= trained_tensors(kind, torch.optim.AdamW(model.parameters()), dict(model.named_parameters()))
    return {name: tensor.detach() for name, tensor in tensors.items()}


def make_worlds(num_ranks: int) -> list[World]:
    store = dist.HashStore()
    return [World(rank, num_ranks, rank, torch.device("cpu"), store, None) for rank in range(num_ranks)]


def save_run(folder: Path, seed: int = 0) -> dict[int, Saved]:
    """Writes the checkpoints of both steps, and returns what they hold, by step."""
    generator, saved = torch.Generator().manual_seed(seed), {}
    writers = [CheckpointWriter(folder, world) for world in make_worlds(NUM_RANKS)]
    for step in STEPS:
        tensors = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in make_tensors().items()}
        counters = {"policy": {"next_step": step}, "drafter": {"version": step // 2, "watch": {"level": step / 7}}}
        own = [{"tuner": {"cells": [[rank, 0.1 / step]]}, "texts": list(range(rank, 50 + step))} for rank in range(NUM_RANKS)]
        for rank, writer in enumerate(writers):
            writer.save(Checkpoint(step, "run", tensors, counters, own[rank]))
        for writer in writers:
            writer.wait()
        saved[step] = Saved(tensors, counters, own)
    return saved


# ── mutations ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _file(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted((folder / f"step-{STEPS[-1]:08d}").iterdir()))


def truncate(folder: Path, rng: random.Random) -> None:
    file = _file(folder, rng)
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def extend(folder: Path, rng: random.Random) -> None:
    file = _file(folder, rng)
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randint(1, 99)))


def flip_bits(folder: Path, rng: random.Random) -> None:
    file = _file(folder, rng)
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def zero_block(folder: Path, rng: random.Random) -> None:
    file = _file(folder, rng)
    data = bytearray(file.read_bytes())
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.randint(1, 4096))
    data[start:end] = bytes(end - start)
    file.write_bytes(data)


def remove(folder: Path, rng: random.Random) -> None:
    _file(folder, rng).unlink()


def make_folder(folder: Path, rng: random.Random) -> None:
    file = _file(folder, rng)
    file.unlink()
    file.mkdir()


def add_stray_file(folder: Path, rng: random.Random) -> None:
    place = rng.choice((folder, folder / f"step-{STEPS[-1]:08d}"))
    (place / rng.choice(("rank-00007.safetensors", "notes.txt", ".nfs0001", "training.pt"))).write_bytes(rng.randbytes(9))


def exchange_between_steps(folder: Path, rng: random.Random) -> None:
    name = _file(folder, rng).name
    old, new = (folder / f"step-{step:08d}" / name for step in STEPS)
    _exchange(old, new)


def exchange_between_ranks(folder: Path, rng: random.Random) -> None:
    kind = rng.choice(("json", "safetensors"))
    one, other = (folder / f"step-{STEPS[-1]:08d}" / f"rank-{rank:05d}.{kind}" for rank in range(NUM_RANKS))
    _exchange(one, other)


def exchange_folders(folder: Path, rng: random.Random) -> None:
    _exchange(*(folder / f"step-{step:08d}" for step in STEPS))


def rename_folder(folder: Path, rng: random.Random) -> None:
    (folder / f"step-{STEPS[-1]:08d}").rename(folder / f"step-{rng.randint(STEPS[-1] + 1, 10**7):08d}")


def copy_older(folder: Path, rng: random.Random) -> None:
    old, new = (folder / f"step-{step:08d}" for step in STEPS)
    shutil.rmtree(new)
    shutil.copytree(old, new)


def edit_manifest(folder: Path, rng: random.Random) -> None:
    file = folder / f"step-{STEPS[-1]:08d}" / MANIFEST
    described = json.loads(file.read_text())
    _edit(rng.choice([described, *[described["manifest"]] * 9]), rng)
    file.write_text(json.dumps(described))


def forge_manifest(folder: Path, rng: random.Random) -> None:
    file = folder / f"step-{STEPS[-1]:08d}" / MANIFEST
    manifest = dataclasses.asdict(read_manifest(file.parent))
    told = {key: manifest.pop(key) for key in ("counters", "run", "tlt")}
    _edit(manifest, rng)
    body = {**manifest, **told}
    file.write_text(_signed(body))


KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": truncate,
    "extended": extend,
    "bits flipped": flip_bits,
    "a block zeroed": zero_block,
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


def _exchange(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def _signed(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True)
    return json.dumps({"manifest": body, "sha256": hashlib.sha256(text.encode()).hexdigest()}, sort_keys=True)


def _edit(value: Any, rng: random.Random) -> None:
    """Changes, removes or doubles something at a random place of nested lists and dicts."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    if isinstance(value[key], tuple):
        value[key] = list(value[key])
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.8:
        _edit(value[key], rng)
        return
    match rng.randrange(4):
        case 0:
            del value[key]
        case 1 if isinstance(value, list):
            value.insert(key, value[key])
        case 2:
            value[key] = rng.choice((None, -1, 0, 10**19, "", "../../../etc/passwd", [], {}, 0.5, True))
        case _:
            value[key] = _near(value[key], rng)


def _near(value: Any, rng: random.Random) -> Any:
    if isinstance(value, str):
        place = rng.randrange(len(value) + 1)
        return value[:place] + rng.choice("0a/.F") + value[place + 1 :]
    return value + rng.choice((-1, 1, 8)) if isinstance(value, int) else [value]


# ── what becomes of them ─────────────────────────────────────────────────────────────────────────────────────────────


def judge(folder: Path, saved: Saved, num_ranks: int) -> str:
    """Returns "detected", "harmless", or what went wrong when a run of so many ranks goes on from the newest checkpoint."""
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
    """Mutates a copy of the run's checkpoints. Returns what became of the newest, and of the older one that the user chooses
    then ("": there was no need)."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    older: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "checkpoints"
        saved = save_run(folder)
        for number in range(arguments.num):
            kind = list(KINDS)[number % len(KINDS)]
            newest, chosen = try_one(folder, saved, kind, random.Random(f"{arguments.seed}/{number}"))
            outcomes[kind][newest] += 1
            older[kind][chosen] += bool(chosen)
    rows = {kind: {"newest": dict(outcomes[kind]), "older, by choice": dict(+older[kind])} for kind in KINDS}
    total = sum(outcomes.values(), Counter())
    failures = sum(count for what, count in (total + sum(older.values(), Counter())).items() if what not in GOOD)
    report = {"num": arguments.num, "seed": arguments.seed, "newest": dict(total), "failures": failures, "by_kind": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in ("num", "newest", "failures")}))


GOOD = ("detected", "harmless", "")

if __name__ == "__main__":
    main()

"""Checkpoints of a run, written by all ranks in the background, whole or not at all.

    checkpoints/step-00000020/   rank-00000.safetensors · rank-00000.json · rank-00001… · manifest.json

    run       ── copy ─▶ next step ──────────────────────────────────────────────────────▶ copy ─▶ …
    threads          └▶ each rank: write, hash, flush ─▶ rank 0: manifest ─▶ rename ─▶ remove older

Only what trains is saved, in its trained precision: a drafter's embedding and head are the policy's, frozen
tensors come from their own folder.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt import __version__
from tlt.base.io.files import flush, remove_own, way_out
from tlt.base.io.text import quoted
from tlt.base.types import LAW_VERSION, UserError
from tlt.training.ranks.waiting import PATIENCE_SECONDS, connect_waiting, on_all_ranks
from tlt.training.ranks.world import World, gather_objects
from tlt.training.saved.inputs import NO_INPUTS, Inputs
from tlt.training.saved.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    describe_state,
    folder_of,
    latest_checkpoint,
    parse_manifest,
    read_manifest,
    verify_files,
)
from tlt.training.saved.retention import CHECKPOINT_FILES, clear_leftovers, discard, remove_older
from tlt.training.saved.shards import (
    CODES,
    FileDigest,
    TensorPiece,
    files_for,
    parts_of,
    read_headers,
    read_into,
    write_hashed,
    write_shard,
)

_VISIBLE_SECONDS = 60.0
"""Network file systems show another host's file late."""
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Checkpoint:
    """One rank's state, besides tensors as JSON.

    step: updates done.
    tensors: all that trains, DTensors if sharded; the same names on every rank.
    counters: shared by all ranks.
    own: this rank's; a thread reads it later, so nobody may change it.
    """

    step: int
    run: str
    tensors: Mapping[str, Tensor]
    counters: Mapping[str, Any]
    own: Mapping[str, Any]
    inputs: Inputs = NO_INPUTS


@dataclass(frozen=True)
class Saved:
    """Default: the run's beginning."""

    step: int = 0
    digest: str = ""


@dataclass(frozen=True)
class _Report:
    """files: name → (bytes, SHA-256)."""

    files: Mapping[str, tuple[int, str]]
    failure: str = ""


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


class CheckpointWriter:
    """All ranks make the same calls, `wait` last.

    keep: number of checkpoints that stay.
    patience: seconds to wait for another rank.
    seconds: spent in this rank's thread so far.
    saved: the latest whole checkpoint, or the resumed one.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        keep: int = 2,
        patience: float = PATIENCE_SECONDS,
        saved: Saved = Saved(),
    ) -> None:
        self.folder, self.world, self.keep, self.saved = folder, world, keep, saved
        self.seconds = 0.0
        self._waiting = connect_waiting(world, patience)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._step = self._number = 0

    def save(self, checkpoint: Checkpoint) -> None:
        """Raises the previous checkpoint's failure."""
        self.wait()
        if self.saved.digest and checkpoint.step == self.saved.step:
            return
        self._step, self._number = checkpoint.step, self._number + 1
        parts = parts_of(checkpoint.tensors, self.world.rank, self.world.world_size)
        counters = json.loads(json.dumps(checkpoint.counters, allow_nan=False))  # a copy
        copied = replace(checkpoint, tensors={}, counters=counters)
        work = partial(self._write, copied, parts)
        self._thread = threading.Thread(target=work, name="checkpoint writer", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Ends the checkpoint in flight. Raises UserError, on all ranks, if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            kept = latest_checkpoint(self.folder)
            left = "there is none before it" if kept is None else f"the one before, {kept}, is whole"
            remedy = f"{way_out(str(error))}, then tlt train --resume {quoted(self.folder.parent)}"
            raise UserError(
                f"the checkpoint of step {self._step} is not written ({error}); {left}; {remedy}"
            ) from error

    def close(self) -> None:
        """After an error: waits a moment for the checkpoint in flight, and for no other rank."""
        if self._thread is not None:
            self._thread.join(_GRACE_SECONDS)
            self._waiting.is_over.set()
            self._thread.join(_GRACE_SECONDS)

    def _write(self, checkpoint: Checkpoint, parts: Mapping[str, TensorPiece]) -> None:
        started = time.perf_counter()
        try:
            self.saved = Saved(checkpoint.step, self._write_with_others(checkpoint, parts))
        except BaseException as error:  # a thread's exception reaches nobody: `wait` raises it
            self._error = error
        self.seconds += time.perf_counter() - started

    def _write_with_others(self, checkpoint: Checkpoint, parts: Mapping[str, TensorPiece]) -> str:
        key = f"checkpoint/{self.folder}/{self._number}"
        new = self.folder / f".step-{checkpoint.step:08d}.new"
        mine = _write_share(new, parts, checkpoint.own, self.world.rank)
        if not self.world.is_leader:
            self._waiting.publish(f"{key}/{self.world.rank}", asdict(mine))
            failure, digest = self._waiting.wait_for(f"{key}/end", "rank 0")
            if failure:
                raise OSError(failure)
            return str(digest)
        failure, digest = "it was interrupted", ""
        try:
            reports = [mine]
            for rank in range(1, self.world.world_size):
                reports.append(_Report(**self._waiting.wait_for(f"{key}/{rank}", f"rank {rank}")))
            digest = commit(new, checkpoint, reports).digest
            remove_older(self.folder, checkpoint.step, self.keep)
            failure = ""
            return digest
        except BaseException as error:  # whatever it is, the other ranks wait for its end
            failure = str(error)
            remove_own(new, CHECKPOINT_FILES)
            raise
        finally:
            self._waiting.publish(f"{key}/end", (failure, digest))


def _write_share(
    folder: Path, parts: Mapping[str, TensorPiece], own: Mapping[str, Any], rank: int
) -> _Report:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{rank:05d}"
        text = json.dumps(own, allow_nan=False).encode()
        written = {f"{name}.json": write_hashed(folder / f"{name}.json", [memoryview(text)])}
        if parts:
            written[f"{name}.safetensors"] = write_shard(folder / f"{name}.safetensors", parts)
        return _Report({name: (digest.num_bytes, digest.sha256) for name, digest in written.items()})
    except Exception as error:  # whatever it is, rank 0 has to hear of it: it waits for this rank
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return _Report({}, f"rank {rank}: {said}")


def commit(new: Path, checkpoint: Checkpoint, reports: Sequence[_Report]) -> Manifest:
    if failure := next((report.failure for report in reports if report.failure), ""):
        raise OSError(failure)
    files = {name: FileDigest(*digest) for report in reports for name, digest in report.files.items()}
    for name, digest in files.items():
        _await_file(new / name, digest)
    for item in new.iterdir():
        if item.name not in files:  # of an earlier attempt, which had more ranks
            item.unlink()
    tensors = read_headers([new / name for name in files if name.endswith(".safetensors")])
    partly = [name for name, tensor in tensors.items() if not tensor.is_whole]
    assert not partly, f"no rank has written the rest of {partly[0]}"
    manifest = Manifest(
        format=FORMAT,
        step=checkpoint.step,
        num_ranks=len(reports),
        law=LAW_VERSION,
        tlt=__version__,
        run=checkpoint.run,
        inputs=checkpoint.inputs,
        counters=dict(checkpoint.counters),
        files=files,
        tensors=tensors,
    )
    write_hashed(new / MANIFEST, [memoryview(manifest.to_json().encode())])
    flush(new)
    final = folder_of(new.parent, checkpoint.step)
    replaced = final.with_name(f".{final.name}.old")
    if final.exists():
        if os.path.lexists(replaced):
            discard(replaced)
        final.rename(replaced)
    new.rename(final)
    flush(final.parent)
    return manifest


def _await_file(path: Path, expected: FileDigest) -> None:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not path.exists() or path.stat().st_size != expected.num_bytes:
        if time.monotonic() > deadline:
            raise OSError(
                f"rank 0 does not see {path}; "
                "run.out_dir must lie where all hosts read and write the same files"
            )
        time.sleep(0.2)


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def find_checkpoint(folder: Path, world: World) -> tuple[Path, Manifest] | None:
    """A collective. Raises UserError, on all ranks, if the newest checkpoint is damaged."""

    def read() -> tuple[str, str] | None:
        if not world.is_leader:
            return None
        clear_leftovers(folder)
        path = latest_checkpoint(folder)
        return None if path is None else (str(path), read_manifest(path).to_json())

    found = gather_objects(world, on_all_ranks(world, read))[0]
    if found is None:
        return None
    path = Path(found[0])
    return path, parse_manifest(found[1].encode(), path)


def load_checkpoint(
    path: Path, manifest: Manifest, tensors: Mapping[str, Tensor], world: World
) -> list[dict[str, Any]]:
    """Fills `tensors` in place, after all ranks have verified their files.

    Returns ranks' own states: its predecessor's first, then orphans'. Raises UserError, on all ranks, for
    anything damaged, missing or another run's.
    """
    described = {name: (CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    if difference := describe_state(described, manifest):
        raise UserError(
            f"{path}: holds {difference}, not what this run trains; start a new run in another folder"
        )
    before, now = manifest.num_ranks, world.world_size
    inherited = range(world.rank, before, now) if world.rank < before else [world.rank % before]
    own = [f"rank-{rank:05d}.json" for rank in inherited]
    on_all_ranks(world, lambda: verify_files(path, manifest, {*files_for(tensors, manifest.tensors), *own}))
    read_into(tensors, manifest.tensors, path)
    return [json.loads((path / name).read_bytes()) for name in own]

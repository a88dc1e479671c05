"""Checkpoints of a run: everything the rest of it depends on, written by all ranks beside it, whole or not at
all.

    checkpoints/step-00000020/   rank-00000.safetensors · rank-00000.json · rank-00001.safetensors · … · manifest.json

    run       ── copy ─▶ next step ────────────────────────────────────────────▶ copy ─▶ …
    threads          └▶ each rank: write, hash, flush ─▶ told to rank 0 ─▶ manifest ─▶ rename ─▶ remove older   one in flight

A rank copies and writes its own shards and an equal share of what all ranks hold; any number can read it
(shards.py). A folder appears under its name only when its manifest is in it; the newest one is where a run
goes on. It holds only what trains: embedding and head of a drafter are the policy's, and whatever else is
frozen comes from its own folder. Weights are kept in the precision they are trained in, so that a resumed
run is the same run. Knows neither trainers nor drafters.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt import __version__
from tlt.io.files import flush, way_out
from tlt.ranks.shards import (
    CODES,
    FileDigest,
    Piece,
    files_for,
    parts_of,
    read_headers,
    read_into,
    write_hashed,
    write_shard,
)
from tlt.ranks.waiting import PATIENCE_SECONDS, connect_waiting, on_all_ranks
from tlt.ranks.world import World, gather_objects
from tlt.saved.inputs import NO_INPUTS, Inputs
from tlt.saved.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    all_checkpoints,
    describe_state,
    folder_of,
    latest_checkpoint,
    parse_manifest,
    read_manifest,
    verify,
)
from tlt.types import LAW_VERSION, UserError

_REPLACED = re.compile(r"\.(step-\d{8})\.old")
_VISIBLE_SECONDS = 60.0
"""How long rank 0 looks for a file that another host has written: network file systems show it late."""
_GRACE_SECONDS = 10.0
"""How long a process that ends waits for the checkpoint in flight."""


@dataclass(frozen=True)
class Checkpoint:
    """What one rank holds of a run.

    step: updates done.
    run: the run's id.
    tensors: all that trains, by name, DTensors where it is sharded; on every rank the same names.
    counters: what all ranks hold alike.
    own: what this rank alone knows, made for this checkpoint: it is read later, by a thread. Both are of
        kinds that JSON has.
    inputs: what the run computes from.
    """

    step: int
    run: str
    tensors: Mapping[str, Tensor]
    counters: Mapping[str, Any]
    own: Mapping[str, Any]
    inputs: Inputs = NO_INPUTS


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole: the updates done, and its digest. By default the run's beginning."""

    step: int = 0
    digest: str = ""


@dataclass(frozen=True)
class _Share:
    """A copy of what one rank writes; further training does not change it."""

    step: int
    run: str
    parts: Mapping[str, Piece]
    counters: str
    own: Mapping[str, Any]
    inputs: Inputs


@dataclass(frozen=True)
class _Report:
    """What a rank tells rank 0: its files, name → (bytes, SHA-256), or why there are none."""

    files: Mapping[str, tuple[int, str]]
    failure: str = ""


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


class CheckpointWriter:
    """Writes checkpoints into `folder` off the critical path, together with the writers of the other ranks:
    all make the same calls. End it with `wait`, or the last failure stays unsaid.

    keep: checkpoints that stay, the newest ones.
    seconds: spent in this rank's thread so far, beside the run.
    saved: the latest that is whole, or that the run goes on from; None: there is none.
    """

    def __init__(self, folder: Path, world: World, keep: int = 2, patience: float = PATIENCE_SECONDS) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self.seconds = 0.0
        self.saved: Saved | None = None
        self._waiting = connect_waiting(world, patience)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._step = self._number = 0

    def save(self, checkpoint: Checkpoint) -> None:
        """Returns as soon as everything is copied; at once where this step is saved. Raises what became of
        the one before, as `wait` does."""
        self.wait()
        if self.saved is not None and checkpoint.step == self.saved.step:
            return
        self._step, self._number = checkpoint.step, self._number + 1
        parts = parts_of(checkpoint.tensors, self.world.rank, self.world.world_size)
        counters = json.dumps(checkpoint.counters, allow_nan=False)
        share = _Share(checkpoint.step, checkpoint.run, parts, counters, checkpoint.own, checkpoint.inputs)
        self._thread = threading.Thread(
            target=self._write, args=(share,), name="checkpoint writer", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is in flight on any rank. Raises UserError, on all ranks, when it could not
        be written: nearly always a full disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            kept = latest_checkpoint(self.folder)
            left = "there is none before it" if kept is None else f"the one before, {kept}, is whole"
            remedy = f"{way_out(str(error))}, then tlt train --resume {self.folder.parent}"
            raise UserError(
                f"the checkpoint of step {self._step} is not written ({error}); {left}; {remedy}"
            ) from error

    def close(self) -> None:
        """Leaves, where the run ends by an error: gives the checkpoint in flight a moment, and waits for
        no other rank then."""
        if self._thread is not None:
            self._thread.join(_GRACE_SECONDS)
            self._waiting.is_over.set()
            self._thread.join(_GRACE_SECONDS)

    def _write(self, share: _Share) -> None:
        started = time.perf_counter()
        try:
            self.saved = Saved(share.step, self._write_with_others(share))
        except BaseException as error:  # a thread's exception reaches nobody: `wait` raises it
            self._error = error
        self.seconds += time.perf_counter() - started

    def _write_with_others(self, share: _Share) -> str:
        """Returns the checkpoint's digest."""
        key = f"checkpoint/{self.folder}/{self._number}"
        partial = self.folder / f".step-{share.step:08d}.new"
        mine = _write_share(partial, share, self.world.rank)
        if not self.world.is_leader:
            self._waiting.tell(f"{key}/{self.world.rank}", asdict(mine))
            failure, digest = self._waiting.hear(f"{key}/end", "rank 0")
            if failure:
                raise OSError(failure)
            return str(digest)
        failure, digest = "it was interrupted", ""
        try:
            others = range(1, self.world.world_size)
            reports = [
                mine,
                *(_Report(**self._waiting.hear(f"{key}/{rank}", f"rank {rank}")) for rank in others),
            ]
            digest = commit(partial, share, reports).digest
            remove_older(self.folder, share.step, self.keep)
            failure = ""
            return digest
        except BaseException as error:  # whatever it is, the other ranks wait for its end
            failure = str(error)
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            self._waiting.tell(f"{key}/end", (failure, digest))


def save_checkpoint(folder: Path, checkpoint: Checkpoint, world: World, keep: int = 2) -> Path:
    """Writes a checkpoint on the spot; every rank calls it. Returns its folder."""
    writer = CheckpointWriter(folder, world, keep)
    writer.save(checkpoint)
    writer.wait()
    return folder_of(folder, checkpoint.step)


def _write_share(partial: Path, share: _Share, rank: int) -> _Report:
    """Writes this rank's files. A failure is told to the others, so that none of them waits for these
    files."""
    try:
        partial.mkdir(parents=True, exist_ok=True)
        shard, own = f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"
        written = {
            own: write_hashed(partial / own, [memoryview(json.dumps(share.own, allow_nan=False).encode())])
        }
        if share.parts:
            written[shard] = write_shard(partial / shard, share.parts)
        return _Report({name: (digest.num_bytes, digest.sha256) for name, digest in written.items()})
    except Exception as error:  # whatever it is, rank 0 has to hear of it: it waits for this rank
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return _Report({}, f"rank {rank}: {said}")


def commit(partial: Path, share: _Share, reports: Sequence[_Report]) -> Manifest:
    """Makes what all ranks have written a checkpoint: its manifest, and then its name. Rank 0 does it."""
    if failure := next((report.failure for report in reports if report.failure), ""):
        raise OSError(failure)
    files = {name: FileDigest(*digest) for report in reports for name, digest in report.files.items()}
    for name, digest in files.items():
        _await_file(partial / name, digest)
    for item in partial.iterdir():
        if item.name not in files:  # of an earlier attempt, which had more ranks
            item.unlink()
    tensors = read_headers([partial / name for name in files if name.endswith(".safetensors")])
    parts = [name for name, tensor in tensors.items() if not tensor.is_whole]
    assert not parts, f"no rank has written the rest of {parts[0]}"
    manifest = Manifest(
        format=FORMAT,
        step=share.step,
        num_ranks=len(reports),
        law=LAW_VERSION,
        tlt=__version__,
        run=share.run,
        inputs=share.inputs,
        counters=json.loads(share.counters),
        files=files,
        tensors=tensors,
    )
    write_hashed(partial / MANIFEST, [memoryview(manifest.to_json().encode())])
    flush(partial)
    final = folder_of(partial.parent, share.step)
    replaced = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    flush(final.parent)
    return manifest


def _await_file(path: Path, expected: FileDigest) -> None:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not path.exists() or path.stat().st_size != expected.num_bytes:
        if time.monotonic() > deadline:
            raise OSError(
                f"rank 0 does not see {path}; run.out_dir must lie where all hosts read and write the same "
                "files"
            )
        time.sleep(0.2)


def remove_older(folder: Path, step: int, keep: int) -> None:
    """Removes what is older than the `keep` newest checkpoints up to this step, and what killed writers
    have left. A newer one is not this run's and stays; a damaged one is not counted."""
    left = keep
    for path in all_checkpoints(folder):
        if path.name > folder_of(folder, step).name:
            continue
        if left <= 0:
            path.rename(path.with_name(f".{path.name}.gone"))  # so that no half of it has a checkpoint's name
        else:
            left -= _has_manifest(path)
    for leftover in folder.glob(".step-*"):
        _discard(leftover)


def _discard(path: Path) -> None:
    """Removes a folder, or what else has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _has_manifest(path: Path) -> bool:
    try:
        read_manifest(path)
    except UserError:
        return False
    return True


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def find_checkpoint(folder: Path, world: World) -> tuple[Path, Manifest] | None:
    """Returns the newest checkpoint and its manifest, the same on all ranks: rank 0 reads it. None: there
    is none. Raises UserError, on all ranks, where it is damaged."""

    def read() -> tuple[str, str] | None:
        if not world.is_leader:
            return None
        clear_leftovers(folder)
        path = latest_checkpoint(folder)
        return None if path is None else (str(path), read_manifest(path).to_json())

    found = gather_objects(world, on_all_ranks(world, read))[0]
    return None if found is None else (Path(found[0]), parse_manifest(found[1].encode(), Path(found[0])))


def load_checkpoint(
    path: Path, manifest: Manifest, tensors: Mapping[str, Tensor], world: World
) -> list[dict[str, Any]]:
    """Fills the tensors of this rank, in place, with what the checkpoint holds of them, after all ranks
    have found all that they need as it was written. Returns what single ranks knew: first the one that
    this rank goes on for, then others that nobody does. Raises UserError, on all ranks, where anything is
    damaged, missing or another run's."""
    described = {name: (CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    if difference := describe_state(described, manifest):
        raise UserError(
            f"{path}: holds {difference}, not what this run trains; start a new run in another folder"
        )
    before, now = manifest.num_ranks, world.world_size
    heirs = range(world.rank, before, now) if world.rank < before else [world.rank % before]
    own = [f"rank-{rank:05d}.json" for rank in heirs]
    on_all_ranks(world, lambda: verify(path, manifest, {*files_for(tensors, manifest.tensors), *own}))
    read_into(tensors, manifest.tensors, path)
    return [json.loads((path / name).read_bytes()) for name in own]


def clear_leftovers(folder: Path) -> None:
    """Removes what killed writers have left; a checkpoint that was moved away, and never replaced, comes
    back."""
    for leftover in folder.glob(".step-*"):
        match = _REPLACED.fullmatch(leftover.name)
        if match is not None and not (folder / match[1]).exists():
            leftover.rename(folder / match[1])
        else:
            _discard(leftover)


def go_back_to(path: Path) -> list[Path]:
    """Makes this checkpoint the one that a run goes on from: newer ones get another name, which is
    returned, and stay. Raises UserError where it is not whole."""
    manifest = read_manifest(path)
    verify(path, manifest, manifest.files)
    aside = []
    for newer in (other for other in all_checkpoints(path.parent) if other.name > path.name):
        names = (
            newer.with_name(f"{newer.name}.aside{suffix}")
            for suffix in ("", *(f"-{n}" for n in range(2, 1000)))
        )
        aside.append(newer.rename(next(name for name in names if not name.exists())))
    return aside

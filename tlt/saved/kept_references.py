"""Keeps a run's references beside its checkpoints. They change the speed alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tlt.drafter.drafting.references import References
from tlt.io.files import write_atomically
from tlt.ranks.world import World, broadcast_bytes

FILE = "references.safetensors"


def keep_references(run: Path, references: References) -> None:
    """Writes the references, which are the same on all ranks."""
    if data := references.encode():
        with write_atomically(run / FILE) as file:
            file.buffer.write(data)


def recall_references(
    run: Path, references: References, vocab_size: int, world: World, say: Callable[[str], None]
) -> None:
    """Restores the references of the last checkpoint on all ranks. A damaged file is said and left out."""
    path = run / FILE
    data = path.read_bytes() if world.is_leader and path.is_file() else b""
    if data := broadcast_bytes(world, data):
        try:
            references.restore(data, vocab_size)
        except ValueError as error:
            say(f"{path}: is left out, for it is not as it was written ({error})")

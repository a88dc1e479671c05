"""The queue of requests to generate ahead in a phase, as keys of its store.

    ahead           number of requests given out, in order from 0; changed by add alone
    ahead/notes     number of notes; changed by add alone
    ahead/note/I    requests that a replica has done, "3,4,9"

It decides time alone: every replica would generate the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed import Store

from tlt.training.ranks.store import ABSENT, read_now


class AheadQueue:
    def __init__(self, store: Store) -> None:
        self.store = store
        self._done: set[int] = set()
        self._told: set[int] = set()
        self._num_read = 0

    def take(self, num: int) -> range:
        """Numbers that no other replica gets."""
        end = self.store.add("ahead", num)
        return range(end - num, end)

    def note_done(self, numbers: Iterable[int]) -> None:
        if new := set(numbers) - self._told:
            self._told |= new
            note = self.store.add("ahead/notes", 1) - 1
            self.store.set(f"ahead/note/{note}", ",".join(map(str, sorted(new))))

    def done(self) -> set[int]:
        """A note still being written is read the next time."""
        for index in range(self._num_read, self.store.add("ahead/notes", 0)):
            if (note := read_now(self.store, f"ahead/note/{index}")) == ABSENT:
                break
            self._done.update(map(int, note.decode().split(",")))
            self._num_read += 1
        return self._done

    def keys(self) -> list[str]:
        notes = range(self.store.add("ahead/notes", 0))
        return ["ahead", "ahead/notes", *(f"ahead/note/{note}" for note in notes)]

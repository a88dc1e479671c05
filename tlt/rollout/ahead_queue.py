"""What is generated ahead in a phase, as keys of its store: who begins which request, and which of them are
done.

    ahead           the requests, numbered from 0 on, that were given out; moved by add alone
    ahead/notes     how many notes there are; moved by add alone
    ahead/note/I    the I-th note: requests that somebody has done, "3,4,9"; each replica reads every note once

Nothing depends on it but time: what two replicas generate is the same. Knows no request and no replica.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed import Store

from tlt.ranks.store import ABSENT, read_now


class AheadQueue:
    """One replica's view of it. store: of this phase."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._done: set[int] = set()
        self._told: set[int] = set()
        self._num_read = 0

    def take(self, num: int) -> range:
        """Returns the next `num` numbers; no other replica is given them."""
        end = self.store.add("ahead", num)
        return range(end - num, end)

    def note_done(self, numbers: Iterable[int]) -> None:
        """Tells the others what this replica has done so far."""
        if new := set(numbers) - self._told:
            self._told |= new
            note = self.store.add("ahead/notes", 1) - 1
            self.store.set(f"ahead/note/{note}", ",".join(map(str, sorted(new))))

    def done(self) -> set[int]:
        """Returns what all replicas together have said to be done. A note that is still being written is
        read the next time."""
        num = self.store.add("ahead/notes", 0)
        while (
            self._num_read < num and (note := read_now(self.store, f"ahead/note/{self._num_read}")) != ABSENT
        ):
            self._done.update(map(int, note.decode().split(",")))
            self._num_read += 1
        return self._done

    def keys(self) -> list[str]:
        """Returns all keys there may be."""
        notes = range(self.store.add("ahead/notes", 0))
        return ["ahead", "ahead/notes", *(f"ahead/note/{note}" for note in notes)]

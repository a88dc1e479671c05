"""What is generated ahead in a phase, as keys of its store: who begins which request, and which of them are done.

    ahead      the requests, numbered from 0 on, that were given out; moved by add alone
    ahead/R    those that replica R has done, "3,4,9"; written by R alone

Nothing depends on it but time: what two replicas generate is the same. Knows no request.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed import Store

from tlt.distributed.store import ABSENT, read_now


class AheadQueue:
    """One replica's view of it. store: of this phase."""

    def __init__(self, store: Store, replica: int, num_replicas: int) -> None:
        self.store, self.replica, self.num_replicas = store, replica, num_replicas

    def take(self, num: int) -> range:
        """Returns the next `num` numbers; no other replica is given them."""
        end = self.store.add("ahead", num)
        return range(end - num, end)

    def note_done(self, numbers: Iterable[int]) -> None:
        """Tells the others what this replica has done so far."""
        self.store.set(f"ahead/{self.replica}", ",".join(map(str, numbers)))

    def done(self) -> set[int]:
        """Returns what all replicas together have said to be done."""
        said = [read_now(self.store, f"ahead/{replica}") for replica in range(self.num_replicas)]
        return {int(number) for one in said if one != ABSENT for number in one.decode().split(",") if number}

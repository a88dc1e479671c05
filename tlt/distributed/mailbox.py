"""A mailbox for one message, the latest, from any rank to all others, through the c10d Store. Does not know what it means.

Nobody waits, and nobody is asked to take part:

    sender    number = next of a counter    data/number/0, 1, …  ─▶  latest = number
    reader    latest newer than what it has?  ─▶  all its pieces, or nothing if a later one has replaced them meanwhile
"""

from __future__ import annotations

from torch.distributed import PrefixStore, Store

from tlt.distributed.store import ABSENT, read_now

PIECE_BYTES = 4 * 2**20
"""The Store's server refuses messages of more than 8 MiB."""

_PRESENT = b"+"
"""Every piece begins with it, so that none reads as ABSENT."""


class Mailbox:
    """One participant's view. A message that it sends replaces the one before.

    store: this mailbox's own prefix (a PrefixStore), on a connection on which nobody blocks.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sent: list[str] = []
        self._number = 0  # of the message read or sent last

    def send(self, payload: bytes) -> None:
        """Makes `payload` the latest message: its pieces first, then the number that names them."""
        pieces = [_PRESENT + payload[i : i + PIECE_BYTES] for i in range(0, len(payload), PIECE_BYTES)]
        number = self._store.add("number", 1)
        keys = [f"data/{number}/{index}" for index in range(len(pieces))]
        for key, piece in zip(keys, pieces, strict=True):
            self._store.set(key, piece)  # type: ignore[arg-type]  # the stubs know text only
        self._store.set("latest", f"{number}/{len(pieces)}")
        for key in self._sent:
            self._store.delete_key(key)
        self._sent, self._number = keys, number

    def receive(self) -> bytes | None:
        """Returns the latest message if it is newer than any that was sent or received here, or None: there is none."""
        latest = read_now(self._store, "latest")
        if latest == ABSENT:
            return None
        number, _, num_pieces = latest.decode().partition("/")
        if int(number) <= self._number:
            return None
        pieces = [read_now(self._store, f"data/{number}/{index}") for index in range(int(num_pieces))]
        if ABSENT in pieces:
            return None
        self._number = int(number)
        return b"".join(piece.removeprefix(_PRESENT) for piece in pieces)


def connect_mailbox(store: Store, name: str) -> Mailbox:
    """Makes a mailbox on a client connection of its own: a message of many bytes holds nobody up."""
    connection: Store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
    return Mailbox(PrefixStore(f"mailbox/{name}", connection))

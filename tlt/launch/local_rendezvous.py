"""The rendezvous of an elastic agent that is the only one, so that there is nothing to agree on and no
port to open: torch's own opens one to all networks. Knows no ranks; they meet in a store of their own
(store.py)."""

from __future__ import annotations

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME = "tlt-one-machine"


class OneMachine(RendezvousHandler):
    """Tells the agent that it is all there is, and its ranks a free port of the loopback."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        store = HashStore()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, local_addr="127.0.0.1"))

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Has nobody to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def register_rendezvous() -> str:
    """Makes the rendezvous known to torch's launcher; returns its name there."""
    rendezvous_handler_registry.register(NAME, OneMachine)
    return NAME

"""The rendezvous of torch's elastic agent on one machine. It opens no port, where torch's own rendezvous
opens one to all networks. The ranks meet in another store (training/ranks/store.py)."""

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
    """A rendezvous of one agent, whose ranks meet at its endpoint."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id, self._endpoint = parameters.run_id, parameters.endpoint

    def next_rendezvous(self) -> RendezvousInfo:
        host, _, port = self._endpoint.rpartition(":")
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(host, int(port)))

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def register_rendezvous() -> str:
    """Registers the rendezvous with torch's launcher; returns its name."""
    rendezvous_handler_registry.register(NAME, OneMachine)
    return NAME

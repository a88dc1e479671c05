"""The rendezvous of torch's elastic agent on one machine. It opens no port; torch's own opens one to all
networks."""

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
    rendezvous_handler_registry.register(NAME, OneMachine)
    return NAME

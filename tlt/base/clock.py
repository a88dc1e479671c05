"""A moment that other processes can count seconds from, by the monotonic clock."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

_BOOT_ID, _TIME_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/time"


@dataclass(frozen=True)
class Moment:
    """The moment when something began. Setting the time of day does not change the seconds since.

    machine: whose clock was read (`machine_name`).
    reading: of the monotonic clock, which all processes of a machine share.
    told_after: seconds that had passed when the moment was sent to others.
    """

    machine: str
    reading: float
    told_after: float = 0.0

    @staticmethod
    def now() -> Moment:
        return Moment(_machine(), time.monotonic())

    @property
    def seconds(self) -> float:
        """Returns the seconds since, on the machine whose clock was read."""
        return time.monotonic() - self.reading

    def told(self) -> Moment:
        """Returns the moment as it is sent to others now."""
        return replace(self, told_after=self.seconds)

    def here(self) -> Moment:
        """Returns the moment on this machine's clock. From another machine it counts on from `told_after`;
        the seconds on its way are lost."""
        return self if self.machine == _machine() else Moment(_machine(), time.monotonic() - self.told_after)


def machine_name() -> str:
    """Returns the name of the monotonic clock: a machine's boot and time namespace; empty: unknown."""
    if not _BOOT_ID.exists():
        return ""
    namespace = os.readlink(_TIME_NAMESPACE) if os.path.lexists(_TIME_NAMESPACE) else ""
    return _BOOT_ID.read_text().strip() + namespace


def _machine() -> str:
    return machine_name() or socket.gethostname()

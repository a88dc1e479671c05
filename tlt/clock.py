"""A moment that other processes can count from, by a clock that nobody sets. Knows not what is timed."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

_BOOT_ID, _TIME_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/time"


@dataclass(frozen=True)
class Moment:
    """When something began. The seconds since do not change with the time of day, which may be set meanwhile.

    machine: whose clock was read (`machine_name`).
    reading: of the monotonic clock, which all processes of a machine share.
    told_after: seconds that had passed when it was told to others.
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
        """Returns it for others to be told now."""
        return replace(self, told_after=self.seconds)

    def here(self) -> Moment:
        """Returns it on this machine's clock. Told by another machine, it counts from now on what had
        passed by then: what it took to come here is lost."""
        return self if self.machine == _machine() else Moment(_machine(), time.monotonic() - self.told_after)


def machine_name() -> str:
    """Names what the monotonic clock belongs to: a start of a machine, and in it a namespace; empty where
    it is unknown."""
    if not _BOOT_ID.exists():
        return ""
    namespace = os.readlink(_TIME_NAMESPACE) if os.path.lexists(_TIME_NAMESPACE) else ""
    return _BOOT_ID.read_text().strip() + namespace


def _machine() -> str:
    return machine_name() or socket.gethostname()

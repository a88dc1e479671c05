"""A moment on the monotonic clock."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

_BOOT_ID, _TIME_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/time"


@dataclass(frozen=True)
class Moment:
    """When something began, in a form that other processes can count seconds from.

    reading: monotonic clock, shared by all processes of `machine`.
    sent_after: seconds passed when the moment was sent to another process.
    """

    machine: str
    reading: float
    sent_after: float = 0.0

    @staticmethod
    def now() -> Moment:
        return Moment(_machine(), time.monotonic())

    @property
    def seconds(self) -> float:
        """Valid on the same machine only (`here`)."""
        return time.monotonic() - self.reading

    def to_send(self) -> Moment:
        return replace(self, sent_after=self.seconds)

    def here(self) -> Moment:
        """Returns this moment on the clock here. Across machines the time of transfer is lost."""
        return self if self.machine == _machine() else Moment(_machine(), time.monotonic() - self.sent_after)


def machine_name() -> str:
    """Boot id and time namespace; empty: unknown."""
    if not _BOOT_ID.exists():
        return ""
    namespace = os.readlink(_TIME_NAMESPACE) if os.path.lexists(_TIME_NAMESPACE) else ""
    return _BOOT_ID.read_text().strip() + namespace


def _machine() -> str:
    return machine_name() or socket.gethostname()

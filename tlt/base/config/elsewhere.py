"""Other trainers' names of our keys, for the error of an unknown key and docs/coming-from.md."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Known:
    """A key of ours, with its names in other trainers: several with spaces between; empty: none there."""

    ours: str
    trl: str = ""
    verl: str = ""
    prime_rl: str = ""
    openrlhf: str = ""
    note: str = ""
    """How the value differs."""


TRAINERS = {"trl": "TRL", "verl": "verl", "prime_rl": "prime-rl", "openrlhf": "OpenRLHF"}


@functools.cache
def known_keys() -> tuple[Known, ...]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(Known(ours, **names) for ours, names in table.items())


@dataclass(frozen=True)
class Meant:
    """Another trainer's name for an entry of ours. is_whole: the whole name was given, not its last part."""

    trainer: str
    name: str
    known: Known
    is_whole: bool

    def describe(self, ours: str) -> str:
        note = f" ({self.known.note})" if self.known.note else ""
        return f"{self.trainer}'s {self.name} is {ours} here{note}"


def find_elsewhere(given: str) -> Meant | None:
    """Looks a name up in other trainers: `max_steps`, `actor_rollout_ref.rollout.n`, or an end of it,
    `rollout.n` before `n`. None: no trainer has it."""
    wanted = given.replace("-", "_")
    found = [
        (rank, trainer, name, known)
        for known in known_keys()
        for column, trainer in TRAINERS.items()
        for name in getattr(known, column).split()
        if (rank := _distance(wanted, name)) is not None
    ]
    if not found:
        return None
    rank, trainer, name, known = min(found, key=lambda each: each[0])
    return Meant(trainer, name, known, rank < _SAME_LAST_PART)


_SAME_LAST_PART = 3


def _distance(wanted: str, name: str) -> int | None:
    last = wanted.rpartition(".")[2]
    if name == wanted:
        return 0
    if "." in wanted and name.endswith(f".{wanted}"):
        return 1
    if name == last:
        return 2
    return _SAME_LAST_PART if name.rpartition(".")[2] == last else None

"""A case: a command in a folder of its own, what surrounds it, and what it may end with. Does not know
what is odd about it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from tests.faults.commands import Command
from tests.faults.fuzz.sound import CONFIG, Sound
from tests.faults.mutations import to_toml
from tlt.apps.cli.main import main as tlt


@dataclass(frozen=True)
class Case:
    """A command. words: what stands after `tlt`.
    trains: `tlt train` goes on to where its ranks start, and on; else it ends there.
    is_fresh: a new Python runs it, not a fork of one that has imported everything.
    environ: changes, None: not set.
    codes: with which exit codes it may end.
    prints: the user's own code writes what it likes to the terminal.
    about: what is odd, where the words do not show it."""

    words: tuple[str, ...]
    trains: bool = False
    is_fresh: bool = False
    environ: Mapping[str, str | None] = field(default_factory=dict)
    streams: tuple[str, str, str] = ("pipe", "pipe", "pipe")
    codes: frozenset[int] = frozenset({0, 2})
    prints: bool = False
    about: str = ""

    def call(self) -> int:
        """Runs the command in this process; returns its exit code."""
        if self.trains or self.words[:1] != ("train",):
            return tlt(self.words)
        with mock.patch("tlt.apps.run.start.launch_ranks", return_value=0):
            return tlt(self.words)

    def command(self, folder: Path) -> Command:
        """Returns what is to be run, in this folder."""
        assert self.trains or not self.is_fresh or self.words[:1] != ("train",) or "--help" in self.words, (
            "it would train"
        )
        words = (sys.executable, "-m", "tlt", *self.words) if self.is_fresh else ()
        return Command(folder, None if self.is_fresh else self.call, words, self.environ, *self.streams)


@dataclass(frozen=True)
class Place:
    """Where a case may write: an empty folder, the working directory. sound: what is not to be changed."""

    here: Path
    sound: Sound

    def write(self, name: str, data: str | bytes) -> Path:
        file = self.here / name
        file.write_bytes(data.encode(errors="surrogatepass") if isinstance(data, str) else data)
        return file

    def copy(self, source: Path) -> Path:
        return Path(shutil.copytree(source, self.here / source.name, symlinks=True))

    def config(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(json.dumps(CONFIG))
        values["model"]["path"], values["drafter"]["path"] = str(self.sound.model), str(self.sound.drafter)
        return values

    def train(self, *overrides: str, **given: Any) -> Case:
        """Returns a run of the sound configuration with these overrides, whose ranks start."""
        file = self.write("run.toml", to_toml(self.config()))
        return Case(("train", str(file), "--run.out_dir", "run", *overrides), trains=True, **given)

    def generate(self, model: Path, prompts: Path, *options: str) -> Case:
        words = (
            "generate",
            str(model),
            "--prompts",
            str(prompts),
            "--out",
            "out.jsonl",
            "--max-tokens",
            "2",
            *options,
        )
        return Case(words)


def lines(records: Sequence[Any]) -> str:
    """Returns records as JSON lines."""
    return "".join(json.dumps(record) + "\n" for record in records)


Kind = Callable[[Place, Random], Case]
"""Makes a case, in its folder."""

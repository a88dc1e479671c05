"""console.log in a run's folder: the screen's plain lines, and the launcher's on stderr."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TextIO, cast

from tlt.base.io.secrets import hide
from tlt.base.io.streams import Guarded, discard, forgive

LOG = "console.log"


def append_to(path: Path) -> TextIO:
    """An unwritable file is said once, on stderr."""
    return forgive(cast(TextIO, _Log(path)), str(path))


@contextmanager
def logging_stderr(path: Path) -> Iterator[None]:
    with redirect_stderr(cast(TextIO, _Copied(sys.stderr, path))):
        yield


class _Log(io.TextIOBase):
    """Several processes print into it: open for one write at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> int:
        with self._path.open("a", encoding="utf-8") as file:
            return file.write(hide(text))


class _Copied(Guarded):
    """Copies lines "tlt: …", each written in one piece, while the log has a folder."""

    def __init__(self, stream: TextIO, path: Path) -> None:
        super().__init__(stream, lambda _: discard(stream))
        self._folder, self._log = path.parent, append_to(path)

    def write(self, text: str) -> int:
        if text.startswith("tlt: ") and self._folder.is_dir():
            self._log.write(text)
        return super().write(text)

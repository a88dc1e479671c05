"""Standard output that cannot be written: no reader (`| head`), a full disk, or closed (`>&-`).

reporting_stdout()    raises StdoutError        around a command
forgiving_output()    raises nothing            around a run in it; forgive_output() in ranks and helpers
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO, cast


class StdoutError(OSError):
    """Standard output cannot be written."""


class Guarded(io.TextIOBase):
    """Writes to another stream until that fails, then nowhere. Escapes characters that the encoding lacks.

    lose: called once, with the error.
    """

    def __init__(self, stream: TextIO | None, lose: Callable[[OSError], None]) -> None:
        self._stream, self._lose = stream, lose
        self._is_lost = stream is None

    def write(self, text: str) -> int:
        self._attempt(lambda stream: stream.write(_writable(text, stream.encoding or "utf-8")))
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda stream: stream.flush())

    def _attempt(self, call: Callable[[TextIO], object]) -> None:
        if self._is_lost or self._stream is None:
            return
        try:
            call(self._stream)
        except OSError as error:
            self._is_lost = True
            self._lose(error)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # IOBase has it as an attribute
        return "utf-8" if self._stream is None else self._stream.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_stream"), name)


def _writable(text: str, encoding: str) -> str:
    return text.encode(encoding, "backslashreplace").decode(encoding)


def guard(stream: TextIO | None, lose: Callable[[OSError], None]) -> TextIO:
    return cast(TextIO, Guarded(stream, lose))


@contextlib.contextmanager
def reporting_stdout() -> Iterator[None]:
    """Raises StdoutError for failed output, at the end of the block at the latest."""
    open_standard_streams()
    stdout = sys.stdout

    def lose(error: OSError) -> NoReturn:
        discard(stdout)
        raise StdoutError(error.errno, error.strerror) from error

    sys.stdout = guard(stdout, lose)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = stdout


def forgive(stream: TextIO | None, name: str = "stdout") -> TextIO:
    """A stream that raises nothing; stderr reports a failed write in one line."""
    return guard(stream, lambda error: _say_lost(error, name))


def forgive_output(says_so: bool = True) -> None:
    """Keeps this process alive where it cannot print: a failed descriptor leads to /dev/null, for child
    processes too. says_so: stderr reports a failed stdout."""
    stdout, stderr = sys.stdout, sys.stderr

    def lose(error: OSError) -> None:
        discard(stdout)
        if says_so:
            _say_lost(error)

    sys.stdout, sys.stderr = guard(stdout, lose), guard(stderr, lambda _: discard(stderr))


@contextlib.contextmanager
def forgiving_output() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    forgive_output()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before


def _say_lost(error: OSError, name: str = "stdout") -> None:
    without = "printing" if name == "stdout" else "it"
    with contextlib.suppress(OSError):  # stderr may be the same pipe: 2>&1 | head
        sys.stderr.write(f"tlt: {name} cannot be written ({error.strerror}); going on without {without}\n")
        sys.stderr.flush()


def discard(stream: TextIO) -> None:
    """Flushing the stream's buffer would fail again at the interpreter's end."""
    with contextlib.suppress(OSError):  # a stream without a descriptor has no rest
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def open_standard_streams() -> None:
    """Else the next opened file gets such a descriptor, and libraries and child processes print into it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)

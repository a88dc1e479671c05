"""Calls functions in a process of limited memory and time.

call_limited ─▶ pipe: function, arguments ─▶ serve ─▶ pipe: the result, or the exception that was raised
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pkgutil
import resource
import select
import signal
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from tlt.base.io.processes import Helper, be_first_to_go, how_it_ended

SECONDS = 10
_ENDS_WITHIN = 10.0
"""Seconds, after it closed its pipe: its memory is freed meanwhile."""
NUM_BYTES = 2**30
"""Address space, of which Python and our modules take a fifth."""
MAX_CHARACTERS = 2**24
"""Longest text returned: millions of tokens, beyond any window."""


class LimitExceeded(Exception):
    """Says why, such as "takes more than 10 s of processor time"."""


def call_limited(function: str, *arguments: Any, **options: Any) -> Any:
    """function: "package.module:name"; arguments and result are pickled."""
    return _process_of(os.getpid()).call(function, arguments, options)


@functools.cache
def _process_of(pid: int) -> _Process:
    return _Process()


class _Process:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: Helper | None = None
        self._readable = select.poll()  # as fast as a call, which `Connection.poll` is not
        self._is_waiting = False

    def call(self, function: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        with self._lock:
            while True:
                helper = self._running()
                self._is_waiting = True
                with contextlib.suppress(EOFError, ConnectionError):
                    helper.pipe.send((function, arguments, options, SECONDS))
                    self._readable.poll()  # a read alone waits for MESSAGE_SECONDS at most
                    answer = helper.pipe.recv()
                    self._is_waiting = False
                    break
                code = helper.end(_ENDS_WITHIN)
                if code != -signal.SIGTERM:  # by SIGTERM it ended with a thread: retry
                    is_late = code == -signal.SIGXCPU
                    late = f"takes more than {SECONDS} s of processor time"
                    raise LimitExceeded(late if is_late else f"ended its process ({how_it_ended(code)})")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _running(self) -> Helper:
        """A helper ends with the thread that started it; after an interrupted call it is replaced, because it
        would answer that call."""
        if self._helper is not None and (self._is_waiting or self._readable.poll(0)):
            self._readable.unregister(self._helper.pipe)
            self._helper.kill()
            self._helper = None
        if self._helper is None:
            self._helper = Helper("tlt.models.hf.limited:serve")
            self._readable.register(self._helper.pipe, select.POLLIN)
            atexit.register(self._helper.kill)
        return self._helper


# ── in the process ──────────────────────────────────────────────────────────────────────────────────────────


def serve(pipe: Connection[Any, Any]) -> None:
    be_first_to_go()
    _limit(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(ValueError):  # macOS has no such limit
        _limit(resource.RLIMIT_AS, NUM_BYTES)
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments, options, seconds = pipe.recv()
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds)
            pipe.send(_answer(function, arguments, options))


def _limit(which: int, number: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (number if hard == resource.RLIM_INFINITY else min(number, hard), hard))


def _answer(function: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    try:
        value = pkgutil.resolve_name(function)(*arguments, **options)
    except MemoryError:
        return LimitExceeded(f"needs more than {NUM_BYTES / 2**30:g} GiB of memory")
    except Exception as error:  # raised again where the call was made
        return error
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return LimitExceeded(f"writes {len(value):,} characters")
    return value

"""The command line.

Exit codes: 2 for a user's mistake, one line on stderr, `tlt: error: place: value; remedy`; 130 for Ctrl-C;
141 where the reader of stdout has gone; 1, with a traceback, for our own faults, or 70 where 1 is a verdict
of the command. `main` imports everything, so that Ctrl-C during an import is handled, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    was_interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    is_ours = before is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from tlt.base.io.streams import reporting_stdout

        with reporting_stdout():
            return _run(arguments)
    except BaseException as error:
        # A library that is being imported may turn the interrupt into another error.
        if was_interrupted or isinstance(error, KeyboardInterrupt):
            _say("interrupted")
            return 130
        from tlt.base.io.secrets import hide
        from tlt.base.io.streams import StdoutError
        from tlt.base.io.text import visible
        from tlt.base.types import UserError

        if isinstance(error, StdoutError):
            if error.errno == errno.EPIPE:  # the reader has gone, such as head
                return 141
            _say(f"error: stdout: cannot be written ({error.strerror}); make room, or send it elsewhere")
            return 2
        if not isinstance(error, UserError):
            if arguments[:1] != ["audit"] or not isinstance(error, Exception):
                raise
            traceback.print_exception(error)
            return 70
        told = " ".join(_as_given(str(error), arguments).split())
        _say(hide(visible(f"error: {told}")))
        return 2
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # where stderr cannot be written, only the exit code tells
        print(f"tlt: {line}", file=sys.stderr, flush=True)


def _as_given(text: str, arguments: Sequence[str]) -> str:
    """Paths below the working directory as the user gave them: a configuration makes them absolute."""
    try:
        here = f"{os.getcwd()}{os.sep}"
    except OSError:  # the folder is gone
        return text
    if any(here in word for word in arguments):
        return text
    return re.sub(rf"(?<![\w./~-]){re.escape(here)}", "", text)


def _run(arguments: Sequence[str]) -> int:
    from tlt import __version__
    from tlt.apps.cli.commands import COMMANDS, FAMILIES, find_command, overview
    from tlt.apps.cli.help import explain
    from tlt.apps.cli.options import parse_options, split_rest
    from tlt.apps.cli.summary import Ended, json_alone, show

    own, rest = split_rest(arguments)  # behind `--` even --help is another program's
    named = [word for word in own if word not in ("-h", "--help")]
    wants_help = len(named) < len(own)
    if not named or (len(named) == 1 and named[0] in FAMILIES):
        print(overview(*named))
        return 0 if wants_help else 2
    if named[0] == "--version":
        print(f"tlt {__version__}")
        return 0
    name, left = find_command(named)
    command = COMMANDS[name]
    if wants_help:
        print(explain(name, command.options, command.lists_keys, command.has_record))
        return 0
    words, as_json = command.split_json(left)
    options = parse_options(name, command.options, words if rest is None else [*words, "--", *rest])
    with json_alone(as_json):
        result = command.run(options)
    if isinstance(result, int):
        return result
    record, code = (result.record, result.exit_code) if isinstance(result, Ended) else (result, 0)
    assert command.summarize is not None, f"tlt {name} prints text alone"
    show(record, command.summarize, as_json)
    return code


if __name__ == "__main__":
    sys.exit(main())

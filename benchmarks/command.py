"""How a benchmark is called: `python -m benchmarks.NAME … --out OUT`; a user's mistake is one line."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tlt.base.types import UserError


def make_parser(
    name: str, doc: str | None, out: str | None = None, needs_out: bool = True
) -> argparse.ArgumentParser:
    """Returns a parser that knows --out. out: its default; None: it has to be given where it is needed."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = None if out is None else Path(out)
    written = "results go to OUT.json and OUT.md"
    parser.add_argument("--out", type=Path, default=default, required=needs_out and out is None, help=written)
    return parser


def command_of(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> str:
    """Returns the line that repeats the measurement. arguments: None, those of the process."""
    return " ".join([parser.prog, *(sys.argv[1:] if arguments is None else arguments)])


def run_child(command: Sequence[object], **environ: str) -> str:
    """Runs a program of another interpreter, tree or process; returns its standard output. Another exit code
    than 0 ends us."""
    inherited = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run([*map(str, command)], env=inherited, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def words(text: str) -> tuple[str, ...]:
    """Returns the words of an argument such as `adaptive,4x1x4`."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def carry_out(name: str, work: Callable[[], int | None]) -> int:
    """Does the work and returns its exit code; a UserError is one line, and 2."""
    try:
        return work() or 0
    except UserError as error:
        print(f"benchmarks.{name}: error: {error}", file=sys.stderr)
        return 2

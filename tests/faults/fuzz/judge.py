"""What becomes of a case: it is run in a folder of its own, and its end is looked at. It ends well by
success, or by exit code 2 and one line that says what is wrong, and leaves no process behind; everything
else is a fault."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.faults.commands import Ending, run
from tests.faults.fuzz.case import Case, Kind, Place
from tests.faults.fuzz.sound import Sound

GOOD = ("success", "refused")
TRACEBACK = "Traceback (most recent call last)"
SPEAKERS = ("tlt: ", "[transformers] ")
"""Who may say something before the one line."""
LONGEST_LINE = 20_000


@dataclass(frozen=True)
class Outcome:
    """what: "success", "refused", or what was wrong.  with_ranks: whether ranks have begun to load."""

    what: str
    with_ranks: bool
    seconds: float
    case: Case


def try_one(kind: Kind, sound: Sound, rng: Random, seconds: float) -> Outcome:
    """Makes a case of a kind in a folder of its own, which is the working directory, runs it and judges
    it."""
    with tempfile.TemporaryDirectory(dir=sound.model.parent, ignore_cleanup_errors=True) as folder:
        here = Path(folder) / "a" / "b" / "c"
        here.mkdir(parents=True)
        case = kind(Place(here, sound), rng)
        ending = run(case.command(here), seconds)
        with_ranks = "loading model and problems" in ending.out or any(here.glob("*/timeline.rank*.jsonl"))
        return Outcome(judge(case, ending), case.trains and with_ranks, ending.seconds, case)


def judge(case: Case, ending: Ending) -> str:
    """Returns "success", "refused", or what was wrong with the end of the case."""
    said = ending.err + ending.out
    if ending.code is None:
        return f"hang: more than {ending.seconds:.0f} s; said {said[-300:]!r}"
    if TRACEBACK in said:
        return f"traceback: {_last_of_traceback(said)}"
    if ending.left:
        return f"left behind: {ending.left}"
    if "\x1b" in said and not case.prints:
        return f"escape sequence: {said[said.index(chr(27)) - 80 :][:200]!r}"
    if ending.code not in case.codes:
        return f"unclear: exit code {ending.code}, said {said[-500:]!r}"
    if ending.code != 2:
        return "success"
    if ending.out.startswith("usage: tlt "):
        return "refused"  # a family of commands without one of them shows what there is
    return "refused" if case.streams[2] != "pipe" else _judge_refusal(ending.err.split("\n"), case)


def _judge_refusal(lines: Sequence[str], case: Case) -> str:
    strange = [line for line in lines if line and not line.startswith(SPEAKERS) and not case.prints]
    errors = [line for line in lines if "tlt: error: " in line]
    if strange or len(errors) != 1:
        return f"unclear: exit code 2, said {[*strange, *errors][-5:]!r}"
    is_clear = errors[0].startswith("tlt: error: ") and any(mark in errors[0] for mark in ("; ", ": ", ", "))
    return "refused" if is_clear and len(errors[0]) < LONGEST_LINE else f"unclear: {errors[0][:300]}"


def _last_of_traceback(said: str) -> str:
    """Returns the error of a traceback, and the last place of ours in it."""
    lines = said[said.index(TRACEBACK) :].split("\n")
    ours = [line for line in lines if "/tlt/" in line and line.strip().startswith("File")]
    place = re.sub(r'.*/tlt/(.*)", line (\d+).*', r"\1:\2", ours[-1]) if ours else "?"
    error = next((line for line in lines[1:] if line and not line.startswith(" ")), "?")
    return f"{error[:200]} at {place}"

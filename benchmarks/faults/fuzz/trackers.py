"""A user's tracker does what it should not: the run goes on, and ends well."""

from __future__ import annotations

from random import Random

from benchmarks.faults.fuzz.case import Case, Place
from benchmarks.faults.fuzz.rewards import CLOSES, ENDS, HEADER, HELPERS, PRINTS, RAISES, STARTS
from benchmarks.faults.mutations import choices

MODULE = """
{header}
{at_import}
completions, given, prompts = [""], {{}}, []

class Tracker:
    def __init__(self):
        {init}
    def begin(self, run):
        {begin}
        return "somewhere"
    def log(self, step, values):
        {log}
    def finish(self):
        {finish}
    {more}
"""
ANSWERS = choices(r"""
    None | 1 | 'x' * 10**6 | '\x1b[2J' | 'a\nb' | '\ud800' | object() | Odd | b'x' | [] | OddNumber()
    lambda: 1
""")
AT_IMPORT = choices("""
    raise ImportError('odd') | raise SystemExit(1) | import no_such_module | raise KeyError
    print('x' * 10**6) | 1 / 0
""")
MORE = choices("""
    begin = None | log = 3 | def log(self): pass | async def begin(self, run): return 'x'
    def __getattr__(self, name): raise Odd
""")
SLOW = ("time.sleep(100)", "threading.Event().wait()", "signal.pause()")
"""They are waited for a minute at the end of a run: played in one case of twenty."""


def trackers(place: Place, rng: Random) -> Case:
    """A tracker is odd in one respect."""
    parts = {"at_import": "", "init": "pass", "begin": "pass", "log": "pass", "finish": "pass", "more": ""}
    where = rng.choice(
        ("at_import", "init", "begin", "begin", "log", "log", "finish", "finish", "more", "answer")
    )
    bodies = (*RAISES, *ENDS, *STARTS, *STARTS, *CLOSES, *PRINTS)
    bodies = tuple(body for body in bodies if body not in SLOW and "SIGSTOP" not in body)
    if where in ("at_import", "more"):
        parts[where] = rng.choice(AT_IMPORT if where == "at_import" else MORE)
    elif where == "answer":
        parts["begin"] = f"return {rng.choice(ANSWERS)}"
    else:
        parts[where] = rng.choice(SLOW if rng.random() < 0.05 else bodies)
    place.write("odd_trackers.py", MODULE.format(header=HEADER + HELPERS, **parts))
    use = "odd_trackers" + rng.choice((":Tracker",) * 6 + (":Odd", ":deep", "", ":x"))
    return place.train("--tracking.use", use, prints="print(" in "".join(parts.values()), about=str(parts))

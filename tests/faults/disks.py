"""Real disks that fail under a run: a tmpfs that is full, without inodes or read-only from a kind of write
on, a folder that is removed, and a sweep of sizes. Each run has to end by itself in one line, and what
follows with room again has to end with the policy, the metrics and the evaluations of the run that had room
all along, to the last bit.

    run that nobody disturbs ─▶ what is right
    fault by fault: a fresh tmpfs ─▶ run; at its moment the disk fails ─▶ exit code, line ─▶ it works again
                                  ─▶ the same command with --resume auto ─▶ same policy, or not

    python -m tests.faults.disks --out benchmarks/results/faults/disks

Nothing is patched to raise: the kernel refuses. Mounts live in a namespace of the process and end with it.
The exit code is 3 where mounting is not allowed, 1 where a case is not as promised.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults import report
from tests.faults.commands import Command, run
from tests.faults.compare import difference
from tests.faults.kills import make_workspace
from tests.faults.victim import before
from tlt.apps.cli.main import main as tlt

LIMIT_SECONDS = 600.0
NOT_ALLOWED = 3
"""Exit code where nothing can be mounted."""
SIZE, INODES = "64m", 2000
SMALL = "small"
BALLAST = "ballast"
FEW = (
    *("--run.num_ranks", "1", "--run.num_steps", "4", "--run.keep_responses", "1"),
    *("--evaluation.every", "2", "--sampling.max_tokens", "16"),
    *("--rollout.samples_per_problem", "2", "--rewards.num_workers", "0"),
)
SHARES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""Sizes of the sweep, of what an undisturbed run takes at most."""


@dataclass(frozen=True)
class Fault:
    """A disk that fails at a moment of a run."""

    name: str
    how: str
    """full, no inodes, read-only or removed."""
    function: str
    """Function at whose call the disk fails, "module:name"; empty: at once."""
    number: int = 1
    """Number of that call."""
    of: str = ""
    """Only calls with this text in their arguments are counted."""
    code: int = 2
    """Expected exit code of the run; 0 where only a picture is lost."""
    words: tuple[str, ...] = ()
    """Further words of the command."""


TIMELINE, WRITER = "tlt.training.report.timeline:Timeline", "tlt.training.saved.checkpoint:CheckpointWriter"
UNKEPT = ("--run.keep_responses", "0")
"""Else they are what is written when a page of the journal is full."""
FAULTS = [
    Fault("config.json", "full", "tlt.training.run:Run.__init__"),
    Fault("timeline, opened", "full", f"{TIMELINE}.__init__"),
    Fault("tracking.json", "full", "tlt.training.report.tracking:write_json"),
    Fault("metrics, opened", "full", "tlt.training.report.step_record:MetricsWriter.__init__"),
    Fault("evaluations.jsonl, first line", "full", "tlt.training.saved.evaluations:Evaluations.add"),
    Fault("evaluations.jsonl, second line", "full", "tlt.training.saved.evaluations:Evaluations.add", 2),
    Fault("journal, its file", "full", "tlt.training.saved.journal:FileJournal._create"),
    Fault("journal, a record", "full", "tlt.training.saved.journal:FileJournal._append", 20, words=UNKEPT),
    Fault("responses", "full", "tlt.training.saved.kept_responses:KeptResponses.write", 2),
    Fault("metrics, a line", "full", "tlt.training.report.step_record:MetricsWriter.write", 3),
    Fault("timeline, a step's spans", "full", f"{TIMELINE}.flush", 2),
    Fault("best/", "full", "tlt.training.run:Run.save_policy", 1, "best"),
    Fault("checkpoint, first", "full", f"{WRITER}.save"),
    Fault("checkpoint, second", "full", f"{WRITER}.save", 2),
    Fault("checkpoint, its manifest", "full", "tlt.training.saved.checkpoint:commit", 2),
    Fault("policy/", "full", "tlt.training.run:Run.save_policy", 1, "policy"),
    Fault("drafter/", "full", "tlt.training.loop:write_products"),
    Fault("timeline.json", "full", "tlt.training.run_products:merge_timelines", code=0),
    Fault("the start", "no inodes", "tlt.training.run:Run.__init__"),
    Fault("a journal's file", "no inodes", "tlt.training.saved.journal:FileJournal._create"),
    Fault("a checkpoint", "no inodes", f"{WRITER}.save", 2),
    Fault("policy/", "no inodes", "tlt.training.run:Run.save_policy", 1, "policy"),
    Fault("before the run", "read-only", ""),
    Fault("a checkpoint", "read-only", f"{WRITER}.save", 2),
    Fault("a step", "read-only", "tlt.training.loop:record", 2),
    Fault("policy/", "read-only", "tlt.training.run:Run.save_policy", 1, "policy"),
    Fault("a step", "removed", "tlt.training.loop:record", 2),
    Fault("a rollout", "removed", "tlt.training.loop:sample", 2),
    Fault("a checkpoint", "removed", "tlt.training.run:Run.checkpoint"),
    Fault("policy/", "removed", "tlt.training.run:Run.save_policy", 1, "policy"),
]


def refusal(words: Sequence[str]) -> str:
    """Returns why a command fails; empty: it does not."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""


# ── the disk ────────────────────────────────────────────────────────────────────────────────────────────────


def mount(*words: str) -> None:
    if why_not := refusal(["mount", *words]):
        raise PermissionError(why_not)


def fill(disk: Path) -> None:
    """Takes all room that is left, to the last page."""
    with suppress(OSError), (disk / BALLAST).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def fill_inodes(disk: Path) -> None:
    (disk / BALLAST).mkdir()
    with suppress(OSError):
        for number in range(2 * INODES):
            (disk / BALLAST / str(number)).touch()


def make_read_only(disk: Path) -> None:
    """Lays the same disk over itself, read-only: files that are open stay writable, as where a network
    mount is changed."""
    mount("--bind", str(disk), str(disk))
    mount("-o", "remount,bind,ro", str(disk))


def remove(disk: Path) -> None:
    shutil.rmtree(disk / "run")


FAIL = {"full": fill, "no inodes": fill_inodes, "read-only": make_read_only, "removed": remove}


def heal(fault: Fault, disk: Path) -> None:
    if fault.how == "read-only":
        subprocess.run(["umount", str(disk)], check=True)
    if (disk / BALLAST).is_dir():
        shutil.rmtree(disk / BALLAST)
    (disk / BALLAST).unlink(missing_ok=True)


def grow(disk: Path) -> None:
    mount("-o", f"remount,size={SIZE}", str(disk))


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────


def fail_at(fault: Fault, disk: Path) -> None:
    """Has the disk fail when the fault's moment comes in this process."""
    if not fault.function:
        return FAIL[fault.how](disk)
    calls = 0

    def act(*arguments: Any) -> None:
        nonlocal calls
        if fault.of in str(arguments[1:]):
            calls += 1
            if calls == fault.number:
                FAIL[fault.how](disk)

    before(fault.function, act)


def play(
    folder: Path, words: Sequence[str], prepare: Callable[[], None] = lambda: None
) -> tuple[int | None, str]:
    """Plays `tlt train WORDS` in a fork of this process, which has imported all; returns exit code and
    what it said."""

    def call() -> int:
        prepare()
        return tlt(["train", *words])

    ending = run(Command(folder, call), LIMIT_SECONDS)
    return ending.code, ending.out + ending.err


Step = Callable[[Path], None]
"""Something done to a disk."""


def play_case(workspace: Path, fault: Fault, fails: Step, heals: Step, size: str = SIZE) -> dict[str, Any]:
    """Plays a run on a disk of its own that fails, and its continuation; returns what came of both."""
    disk = workspace / "disk"
    disk.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={size},nr_inodes={INODES}", "tmpfs", str(disk))
    try:
        folder = disk / "run"
        words = [str(workspace / "run.toml"), "--run.out_dir", str(folder), *FEW, *fault.words]
        code, said = play(workspace, words, lambda: fails(disk))
        kept = sorted(path.name for path in folder.glob("checkpoints/step-*"))
        heals(disk)
        again, said_then = play(workspace, [*words, "--resume", "auto"])
        differs = said_then if again else difference(folder, workspace / "whole")
        lines = [line.strip() for line in said.splitlines() if "tlt: error: " in line or "cannot be" in line]
        told = [line.replace(str(disk), "DISK").replace(str(workspace), "WORK") for line in lines]
        facts = {"name": fault.name, "how": fault.how, "expected": fault.code, "code": code, "said": told}
        then = {"kept": kept, "resumed": again, "differs": differs}
        return {**facts, **then, "traceback": "Traceback" in said + said_then}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def is_as_promised(case: Mapping[str, Any]) -> bool:
    """One line, or none where only a picture was lost, that says to make room where some is missing; and the
    run that goes on is the one that was never disturbed."""
    errors = [line for line in case["said"] if line.startswith("tlt: error: ")]
    ended = case["code"] == case["expected"] or (case["how"] == SMALL and case["code"] == 0)
    return (
        ended
        and (case["how"] not in ("full", "no inodes") or "make room" in "".join(case["said"]))
        and len(errors) == bool(case["code"])
        and not case["traceback"]
        and case["resumed"] == 0
        and not case["differs"]
    )


def measure(workspace: Path, faults: Sequence[Fault], shares: Sequence[float]) -> list[dict[str, Any]]:
    import transformers  # noqa: F401  # what takes time is imported once, before the forks

    import tlt.apps.run.start  # noqa: F401

    sys.path.insert(0, str(workspace))
    os.environ.update(PYTHONPATH=os.pathsep.join([str(workspace), *sys.path]), NO_COLOR="1")
    whole = workspace / "whole"
    code, said = play(workspace, [str(workspace / "run.toml"), "--run.out_dir", str(whole), *FEW])
    assert code == 0, said
    cases = []
    for fault in faults:
        cases.append(play_case(workspace, fault, partial(fail_at, fault), partial(heal, fault)))
        print(json.dumps(cases[-1]), flush=True)
    most = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    for share in shares:
        size = f"{max(int(share * most) // 1024, 4)}k"
        fault = Fault(f"{share:.0%} of what a run leaves", SMALL, "")
        cases.append(play_case(workspace, fault, lambda disk: None, grow, size))
        print(json.dumps(cases[-1]), flush=True)
    return cases


def text_of(cases: Sequence[Mapping[str, Any]]) -> report.Text:
    rows = []
    for case in cases:
        printed = "<br>".join(line.replace("|", "\\|") for line in case["said"]) or "nothing of it"
        then = "same policy, metrics, evaluations" if not case["differs"] else "**differs**"
        rows.append(
            [case["how"], case["name"], case["code"], printed, ", ".join(case["kept"]) or "none", then]
        )
    text = (
        f"{sum(map(is_as_promised, cases))} of {len(cases)} cases as promised: one line, or a note where "
        "only a "
        "picture was lost, no traceback, and the resumed run ends as the undisturbed one."
    )
    columns = ["disk", "from this write on", "exit code", "printed", "checkpoints left", "with room again"]
    return "Disks that fail under a run", text, columns, rows


def main() -> int:
    parser = report.make_parser("disks", __doc__)
    parser.add_argument("--only", default="", help="cases with this text in their name alone")
    parser.add_argument("--in-namespace", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.in_namespace:
        namespace = ["unshare", "--user", "--map-root-user", "--mount"]
        if why_not := refusal([*namespace, "true"]):
            print(f"no namespace can be made here: {why_not}")
            return NOT_ALLOWED
        words = [sys.executable, "-m", "tests.faults.disks", *sys.argv[1:], "--in-namespace"]
        return subprocess.run([*namespace, *words], check=False).returncode
    with tempfile.TemporaryDirectory() as name:
        workspace = Path(name)
        try:
            mount("-t", "tmpfs", "tmpfs", name)
        except PermissionError as error:
            print(f"nothing can be mounted here: {error}")
            return NOT_ALLOWED
        try:
            make_workspace(workspace, num_steps=4)
            faults = [fault for fault in FAULTS if options.only in fault.name]
            cases = measure(workspace, faults, () if options.only else SHARES)
        finally:
            subprocess.run(["umount", "-R", name], check=True)
    report.write(options.out, {**report.begin("disks"), "cases": cases}, text_of(cases))
    return int(not all(map(is_as_promised, cases)))


if __name__ == "__main__":
    sys.exit(main())

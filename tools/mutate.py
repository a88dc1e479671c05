"""Mutation testing of the core: changes one place of a room, and asks the room's tests whether they notice.

    python -m tools.mutate [--num 150] [--room law …] [--only DIGEST …] [--tests PATH …]

Which mutants are tried follows from digests of their text: the same ones again after unrelated changes. Tests
run in forks of this process, which imports what is slow to import, and not `tlt`. mutmut passes over
decorated functions, the law's kernels among them; cosmic-ray drops no statement.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SLOW_IMPORTS = ("torch._dynamo", "numba", "scipy.stats", "pytest")
LAW = "tests/lossless"
MODELS = tuple(f"tlt/models/{name}.py" for name in ("decoder", "packed", "attention", "kv_cache"))

ROOMS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "journal": (["tlt/training/saved/journal.py"], ["tests/unit/training/saved/test_journal.py"]),
    "rewards": (["tlt/tasks/equivalence.py", "tlt/tasks/rewards/scoring.py"], ["tests/unit/tasks"]),
    "update": (["tlt/training/update"], ["tests/unit/training/update"]),
    "rollout": (["tlt/training/rollout"], ["tests/unit/training/rollout"]),
    "idle": (["tlt/training/idle"], ["tests/unit/training/idle", "tests/unit/training/rollout"]),
    "law": (["tlt/speculation/law"], [LAW]),
    "engine": (["tlt/engine/own"], ["tests/unit/engine/own", LAW]),
    "drafting": (["tlt/drafter/drafting"], ["tests/unit/drafter", LAW]),
    "models": (MODELS, ["tests/unit/models", "tests/unit/engine/own", "tests/unit/drafter", LAW]),
}
"""Each room's files, and the tests that should notice a change there."""

PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div)),
)
OPPOSITES: dict[Any, Any] = {ast.FloorDiv: ast.Mult} | {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
RENAMED = {"min": "max", "amin": "amax", "minimum": "maximum", "clamp_min": "clamp_max", "any": "all"}
RENAMED |= {after: before for before, after in RENAMED.items()}
NOT_MUTATED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
"""Messages and our own invariants: no test depends on them."""


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    change: str
    digest: str
    source: bytes
    """The whole file, mutated."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.digest} {self.change}"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yields (kind, what is replaced, by which text) for every change of the node itself."""

    def with_fields(**fields: object) -> str:
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        return ast.unparse(changed) if isinstance(changed, ast.stmt) else f"({ast.unparse(changed)})"

    match node:
        case ast.Compare(ops=[op, *rest]) if type(op) in OPPOSITES:
            yield "comparison", node, with_fields(ops=[OPPOSITES[type(op)](), *rest])
        case ast.BoolOp(op=op):
            yield "and, or", node, with_fields(op=OPPOSITES[type(op)]())
        case ast.BinOp(op=op) if type(op) in OPPOSITES:
            yield "arithmetic", node, with_fields(op=OPPOSITES[type(op)]())
        case ast.AugAssign(op=op):
            yield "dropped", node, "pass"
            if type(op) in OPPOSITES:
                yield "arithmetic", node, with_fields(op=OPPOSITES[type(op)]())
        case ast.Constant(value=bool() as value):
            yield "constant", node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", node, f"({value - 1 if value % 2 else value + 1})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not removed", node, f"({ast.unparse(operand)})"
        case (
            ast.If(test=test)
            | ast.While(test=test)
            | ast.IfExp(test=test)
            | ast.comprehension(ifs=[test, *_])
        ):
            yield "condition negated", test, f"(not ({ast.unparse(test)}))"
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped", node, "pass"
        case ast.Call(func=ast.Name(id=name) as function) if name in RENAMED:
            yield "renamed", function, RENAMED[name]
        case ast.Call(func=ast.Attribute(attr=name) as function) if name in RENAMED:
            yield "renamed", function, f"{ast.unparse(function.value)}.{RENAMED[name]}"
        case ast.Call(args=[first, second, *rest]) if not isinstance(second, ast.Starred):
            if ast.unparse(first) != ast.unparse(second):
                yield "arguments swapped", node, with_fields(args=[second, first, *rest])


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the node and all in it, annotations, decorators and messages excluded."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, NOT_MUTATED):
                    yield from nodes(child)


def mutants(path: str, source: bytes) -> Iterator[Mutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: dict[str, int] = {}
    for node in nodes(ast.parse(source)):
        for kind, place, after in changes(node):
            at: Any = place
            begin, end = starts[at.lineno - 1] + at.col_offset, starts[at.end_lineno - 1] + at.end_col_offset
            before = source[begin:end].decode()
            text = f"{path} {kind} {before} {after}"
            seen[text] = seen.get(text, -1) + 1
            digest = hashlib.sha256(f"{text} {seen[text]}".encode()).hexdigest()[:10]
            mutated = source[:begin] + after.encode() + source[end:]
            yield Mutant(path, at.lineno, f"{kind}: `{before}` → `{after}`", digest, mutated)


def sample(num: int) -> dict[str, list[Mutant]]:
    """Returns about `num` mutants by room, each room's share in proportion to how many it has."""
    by_room: dict[str, list[Mutant]] = {}
    for room, (places, _) in ROOMS.items():
        files = [
            file for place in places for file in (sorted(Path(ROOT, place).rglob("*.py")) or [ROOT / place])
        ]
        found = (m for file in files for m in mutants(str(file.relative_to(ROOT)), file.read_bytes()))
        by_room[room] = sorted(found, key=lambda mutant: mutant.digest)
    share = num / sum(map(len, by_room.values()))
    return {room: found[: round(share * len(found))] for room, found in by_room.items()}


def _run_tests(tests: Sequence[str], log: Path) -> None:
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    options = ["-x", "-q", "--assert=plain", "-m", "not slow", "-p", "no:cacheprovider", "-n", "0"]
    os._exit(importlib.import_module("pytest").main([*options, *tests]))


def pass_over(path: Path, source: bytes, tests: Sequence[str], patience: float, log: Path) -> bool:
    """Whether the tests pass within `patience` seconds with this source in the file's place."""
    original, times = path.read_bytes(), path.stat()
    process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(tests, log))
    path.write_bytes(source)
    try:
        process.start()
        process.join(patience)
        return process.exitcode == 0
    finally:
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        path.write_bytes(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def survivors(chosen: Sequence[Mutant], tests: Sequence[str], log: Path) -> Iterator[Mutant]:
    begin, first = time.monotonic(), ROOT / chosen[0].path
    if not pass_over(first, first.read_bytes(), tests, 900, log):
        sys.exit(f"{' '.join(tests)} fail without a mutant:\n{log.read_text(errors='replace')}")
    patience = 60 + 4 * (time.monotonic() - begin)
    for mutant in chosen:
        survived = pass_over(ROOT / mutant.path, mutant.source, tests, patience, log)
        failed = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("FAILED")]
        print("SURVIVED" if survived else "noticed ", mutant, *failed[:1], flush=True)
        if survived:
            yield mutant


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.mutate")
    parser.add_argument("--num", type=int, default=150, help="about how many mutants, over all rooms")
    parser.add_argument("--room", choices=list(ROOMS), nargs="+", help="these rooms alone")
    parser.add_argument("--only", nargs="+", metavar="DIGEST", help="these mutants alone")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="instead of the rooms' own tests")
    options = parser.parse_args()

    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True  # a mutant may have its original's size and second
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    for room, found in sample(options.num).items():
        chosen = [mutant for mutant in found if mutant.digest in (options.only or [mutant.digest])]
        if chosen and room in (options.room or ROOMS):
            with tempfile.TemporaryDirectory() as folder:
                alive = [*survivors(chosen, options.tests or ROOMS[room][1], Path(folder, "log"))]
            print(f"{room}: {len(alive)} of {len(chosen)} survived")


if __name__ == "__main__":
    main()

"""How large the parts of the house may be, and what the core may stand on.

A file is one idea, a function a few steps, a call a sentence. The limits lie well above what most parts need: they
find what has grown out of shape, and shape nothing themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import tlt

ROOT = Path(tlt.__file__).parent
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_ARGUMENTS = 8
MAX_COLUMNS = 110

CORE = (
    "tlt.engine.own.",
    "tlt.drafter.drafting.learned.",
    "tlt.speculation.law.",
    "tlt.speculation.tuner.tuner",
)
NOT_IN_CORE = (
    "tlt.base.config",
    "tlt.models.hf",
    "tlt.training.saved",
    "tlt.base.io.files",
    "tlt.base.io.hub",
    "tlt.base.io.data",
    "tlt.engine.build",
)


parse = cache(ast.parse)


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield str(path.relative_to(ROOT.parent)), path.read_text(encoding="utf-8")


def too_long_functions(name: str, source: str) -> list[str]:
    nodes = (
        node for node in ast.walk(parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = {f"{name}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes}
    return [f"{place} has {length} lines" for place, length in lengths.items() if length > MAX_FUNCTION_LINES]


def too_many_arguments(name: str, source: str) -> list[str]:
    """Definitions with more than eight parameters, and calls with more than eight by position. Fields of a
    record, given by name, are no arguments in this sense: there each says what it is."""
    found = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([n for n in names if n not in ("self", "cls")])
            place = f"{name}:{node.name}"
        elif isinstance(node, ast.Call):
            count, place = len(node.args), f"{name}:{node.lineno}"
        else:
            continue
        if count > MAX_ARGUMENTS:
            found.append(f"{place} has {count} arguments")
    return found


def test_no_file_is_longer_than_one_idea() -> None:
    lengths = {name: len(source.splitlines()) for name, source in sources()}
    assert len(lengths) > 50
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    assert [line for name, source in sources() for line in too_long_functions(name, source)] == []


def test_nothing_takes_more_than_eight_arguments() -> None:
    assert [line for name, source in sources() for line in too_many_arguments(name, source)] == []


# ── what the core stands on ───────────────────────────────────────────────────────────────────────────────────


def modules() -> dict[str, str]:
    """Returns the source of every module by its dotted name."""
    names = {
        name: name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name, _ in sources()
    }
    return {names[name]: source for name, source in sources()}


def imports_when_loaded(source: str) -> Iterator[str]:
    """Yields the names that a module imports when it is loaded, not later and not for type checkers."""
    found: list[ast.AST] = list(parse(source).body)
    while found:
        node = found.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += ast.iter_child_nodes(node)


def closure(starts: tuple[str, ...], known: Mapping[str, str]) -> set[str]:
    """Returns the modules whose names begin with one of `starts`, and all that they import."""
    left, seen = [name for name in known if name.startswith(starts)], set()
    assert left, f"no module begins with {starts}"
    while left:
        if (name := left.pop()) in seen:
            continue
        seen.add(name)
        for imported in imports_when_loaded(known[name]):
            left += [
                module
                for module in (imported, imported.rpartition(".")[0])
                if module in known and module != "tlt"
            ]
    return seen


def test_the_core_stands_on_no_configuration_no_hub_and_no_checkpoints() -> None:
    core = closure(CORE, modules())
    assert [name for name in core if name.startswith(NOT_IN_CORE)] == []


def test_lines_are_short() -> None:
    assert [
        f"{name}:{number}"
        for name, source in sources()
        for number, line in enumerate(source.splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ] == []

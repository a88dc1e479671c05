"""How large the parts of the house may be. A file is one idea, a function a few steps, a call a sentence;
where a limit is met, split what is there by what it means rather than raise the limit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tlt

ROOT = Path(tlt.__file__).parent
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 80
MAX_ARGUMENTS = 8


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield str(path.relative_to(ROOT.parent)), path.read_text(encoding="utf-8")


def too_long_functions(name: str, source: str) -> list[str]:
    nodes = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = {f"{name}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes}
    return [f"{place} has {length} lines" for place, length in lengths.items() if length > MAX_FUNCTION_LINES]


def too_many_arguments(name: str, source: str) -> list[str]:
    """Definitions with more than eight parameters, and calls with more than eight by position. Fields of a
    record, given by name, are no arguments in this sense: there each says what it is."""
    found = []
    for node in ast.walk(ast.parse(source)):
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


def test_what_is_too_large_is_found() -> None:
    body = "\n".join("    x = 0" for _ in range(MAX_FUNCTION_LINES))
    assert too_long_functions("m.py", f"def f():\n{body}\n") == ["m.py:f has 81 lines"]
    assert too_many_arguments("m.py", "def f(self, a, b, c, d, e, *, f, g, h, i): ...") == [
        "m.py:f has 9 arguments"
    ]
    assert too_many_arguments("m.py", "f(1, 2, 3, 4, 5, 6, 7, 8, 9)\ng(1, a=2)\n") == [
        "m.py:1 has 9 arguments"
    ]

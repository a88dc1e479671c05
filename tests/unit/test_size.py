"""How large the parts of the house may be, and how much must be read to understand one of them.

A file is one idea, a function a few steps, a call a sentence. Where a limit is met, split by meaning rather
than raise it. The limits of closures and tokens lie a few percent above today's figures: whoever adds that
much says why here.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import tlt

ROOT = Path(tlt.__file__).parent
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 80
MAX_ARGUMENTS = 8
MAX_COLUMNS = 110

PHASE = ("tlt.rollout.phase",)
MAX_PHASE_LINES = 7_400
"""Lines of all files that the rollout phase stands on."""
CORE = ("tlt.engine.", "tlt.drafter.drafting.", "tlt.speculative.", "tlt.tuning.tuner")
MAX_CORE_LINES = 10_320
"""Lines of all files that the law, the engine, drafting and the tuner stand on; 800 of them are the block
drafters' and the split of what they share with EAGLE."""
NOT_IN_CORE = (
    "tlt.config",
    "tlt.hf",
    "tlt.saved",
    "tlt.io.files",
    "tlt.io.hub",
    "tlt.io.data",
    "tlt.assembly",
)
MAX_TOKENS = 308_480
"""Tokens of code in the package: no comments, no docstrings; 190 of them grow an eagle3 drafter and record
the processor seconds of training, 40 let the tuner decide less often, 5 are the rows of
a block's slots, 20 find the commit of the code that is measured."""


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


# ── how much must be read ───────────────────────────────────────────────────────────────────────────────────


def modules() -> dict[str, str]:
    """Returns the source of every module by its dotted name."""
    names = {
        name: name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name, _ in sources()
    }
    return {names[name]: source for name, source in sources()}


def imports_when_loaded(source: str) -> Iterator[str]:
    """Yields the names that a module imports when it is loaded, not later and not for type checkers."""
    found: list[ast.AST] = list(ast.parse(source).body)
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


def count_lines(names: set[str], known: Mapping[str, str]) -> int:
    return sum(len(known[name].splitlines()) for name in names)


def count_tokens(source: str) -> int:
    """Counts the tokens of a module without comments and docstrings."""
    layout = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    texts = {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        t.type not in layout and not (t.type == tokenize.STRING and t.start[0] in texts) for t in tokens
    )


def test_the_rollout_phase_stands_on_few_files() -> None:
    assert count_lines(closure(PHASE, modules()), modules()) <= MAX_PHASE_LINES


def test_the_core_stands_on_no_configuration_no_hub_and_no_checkpoints() -> None:
    core = closure(CORE, modules())
    assert [name for name in core if name.startswith(NOT_IN_CORE)] == []
    assert count_lines(core, modules()) <= MAX_CORE_LINES


def test_the_package_has_no_more_code_than_it_says() -> None:
    assert sum(count_tokens(source) for source in modules().values()) <= MAX_TOKENS


def test_lines_are_short() -> None:
    assert [
        f"{name}:{number}"
        for name, source in sources()
        for number, line in enumerate(source.splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ] == []


def test_a_closure_follows_what_is_loaded_and_nothing_else() -> None:
    known = {
        "tlt.a": "from tlt.b import B\nif TYPE_CHECKING:\n    from tlt.d import D\n",
        "tlt.b": "def f():\n    from tlt.d import D\nif True:\n    from tlt import c\n",
        "tlt.c": "import torch\n",
        "tlt.d": "",
    }
    assert closure(("tlt.a",), known) == {"tlt.a", "tlt.b", "tlt.c"}
    assert count_tokens('"""A text."""\nx = 1  # one\n') == 3

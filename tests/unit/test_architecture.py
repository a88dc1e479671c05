"""Imports point down only. These tests read every import statement under tlt/, those inside functions and for
type checkers included.

A wing is a folder of tlt/, a room any folder with modules. A module may use its own wing and the wings that
MAY_USE names; rooms import each other in no circle, and neither do files. `tlt` itself and `python -m tlt` stand
above everything: the first hands public names on, the second starts the command line.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

import tlt

ROOT = Path(tlt.__file__).parent

MAY_USE: dict[str, set[str]] = {
    "base": set(),
    "speculation": {"base"},
    "models": {"base"},
    "tasks": {"base"},
    "drafter": {"models", "speculation", "base"},
    "engine": {"drafter", "models", "speculation", "base"},
    "training": {"engine", "drafter", "models", "tasks", "base"},
    "apps": {"training", "engine", "drafter", "models", "tasks", "speculation", "base"},
}
ABOVE_ALL = {"__init__", "__main__"}

parse = cache(ast.parse)


def find_violations(module: str, source: str) -> list[str]:
    """The imports in `source` that its place forbids. `module` is dotted, such as "tlt.engine.own.engine"."""
    wing = _wing(module)
    return [
        f"{module}:{line} imports tlt.{target}, which {wing} may not use"
        for line, target in _imported_wings(module, source)
        if target not in MAY_USE[wing] | {wing}
    ]


def _wing(module: str) -> str:
    return module.split(".")[1]


@cache
def _imported_names(module: str, source: str) -> list[tuple[int, str]]:
    """(line, dotted name) of everything imported, those for type checkers and inside functions included."""
    found = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def _imported_wings(module: str, source: str) -> list[tuple[int, str]]:
    """(line, wing) of everything imported from the package; `tlt` itself, its version, is no wing."""
    names = _imported_names(module, source)
    return [
        (line, name.split(".")[1])
        for line, name in names
        if name.startswith("tlt.") and not name.startswith("tlt.__")
    ]


def find_circle(modules: Mapping[str, str], rooms: bool = False) -> list[str]:
    """Modules that import each other, the first one again at the end; none: there is no circle. modules: name
    to source. rooms: looks for folders that import each other instead."""

    def file_of(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]

    def node_of(module: str) -> str:
        return module.rpartition(".")[0] if rooms else module

    graph: dict[str, set[str]] = {}
    for module, source in modules.items():
        found = {file_of(name) for _, name in _imported_names(module, source)} & modules.keys() - {"tlt"}
        graph.setdefault(node_of(module), set()).update(map(node_of, found))
    try:
        graphlib.TopologicalSorter({node: used - {node} for node, used in graph.items()}).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _modules() -> dict[str, str]:
    sources = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)
        sources[module] = path.read_text(encoding="utf-8")
    return sources


def _below_the_face() -> dict[str, str]:
    return {module: source for module, source in _modules().items() if _wing(module) not in ABOVE_ALL}


def test_there_are_eight_wings() -> None:
    assert {_wing(module) for module in _below_the_face()} == MAY_USE.keys()


def test_imports_point_down_only() -> None:
    modules = _below_the_face()
    assert len(modules) > 10
    assert [line for module, source in modules.items() for line in find_violations(module, source)] == []


@pytest.mark.parametrize("rooms", [False, True])
def test_neither_files_nor_rooms_import_each_other_in_a_circle(rooms: bool) -> None:
    assert find_circle(_below_the_face(), rooms) == []


def test_the_package_itself_imports_its_own_for_type_checkers_alone_and_tells_them_the_truth() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    told: dict[str, tuple[str, ...]] = {}
    for node in [node for node in tree.body if isinstance(node, ast.If)]:
        assert ast.unparse(node.test) == "TYPE_CHECKING"
        told |= {
            s.module: tuple(alias.name for alias in s.names)
            for s in node.body
            if isinstance(s, ast.ImportFrom) and s.module
        }
        node.body = [ast.Pass()]
    assert _imported_wings("tlt.__init__", ast.unparse(tree)) == []
    assert told == tlt._HOMES


@pytest.mark.parametrize(
    "spelling",
    [
        "import tlt.engine.own.prefill",
        "from tlt.engine import own",
        "from tlt import engine",
        "from ...engine import x",
        "def f():\n    from tlt.engine.own.engine import RolloutEngine",
        "if TYPE_CHECKING:\n    from tlt.engine.own.engine import RolloutEngine",
    ],
)
def test_a_forbidden_import_is_found_in_each_of_its_spellings(spelling: str) -> None:
    line = spelling.count("\n") + 1
    for module, wing in (("tlt.models.hf.weights", "models"), ("tlt.speculation.law.verify", "speculation")):
        assert find_violations(module, spelling) == [
            f"{module}:{line} imports tlt.engine, which {wing} may not use"
        ]


def test_what_runs_inside_vllm_knows_nothing_of_what_drives_it() -> None:
    inside = {module: source for module, source in _modules().items() if module.startswith(f"{INSIDE}.")}
    assert len(inside) > 5
    drivers = [
        name
        for module, source in inside.items()
        for name in _imported(source)
        if name.startswith("tlt.engine.vllm")
    ]
    assert [name for name in drivers if not name.startswith(INSIDE)] == []


INSIDE = "tlt.engine.vllm.inside"


def _imported(source: str) -> list[str]:
    """Names of modules that are imported anywhere in a source."""
    nodes = list(ast.walk(parse(source)))
    return [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names] + [
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


def test_the_mathematics_of_losslessness_imports_torch_and_types_only() -> None:
    """Whoever checks speculation/law needs no other part of the package."""
    plain = {
        "__future__",
        "abc",
        "collections",
        "dataclasses",
        "functools",
        "itertools",
        "math",
        "re",
        "types",
    }
    allowed = {"torch", "tlt", "typing"} | plain
    for module, source in _modules().items():
        if not module.startswith("tlt.speculation.law"):
            continue
        for node in ast.walk(parse(source)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            also = COMPILED_WITH.get(module, set())
            assert {name.split(".")[0] for name in names} <= allowed | also, f"{module} imports {names}"


COMPILED_TOO = "tlt.drafter.drafting.learned.chain_stages"
"""Loops that draw by the law's; compiled_chain.py alone imports them."""

COMPILED_WITH = {
    "tlt.speculation.law.fused": {"triton"},
    "tlt.speculation.law.fused_logprobs": {"triton"},
    "tlt.speculation.law.compiled": {"numba", "numpy", "concurrent"},
}


@pytest.mark.parametrize(
    ("compiled", "importer"),
    [
        ("tlt.speculation.law.fused", "tlt.speculation.law.sampling"),
        ("tlt.speculation.law.compiled", "tlt.speculation.law.draw"),
        ("tlt.drafter.drafting.learned.compiled_chain", "tlt.drafter.drafting.learned.pair_cache"),
        ("tlt.models.triton.attention", "tlt.models.equal"),
        ("tlt.models.triton.products", "tlt.models.equal"),
        ("tlt.models.triton.rows", "tlt.models.equal"),
    ],
)
def test_what_a_package_compiles_is_imported_by_a_function_alone_so_that_all_works_without_it(
    compiled: str, importer: str
) -> None:
    found = {}
    for module, source in _modules().items():
        tree = parse(source)
        imported = [
            node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and _imports(node, compiled)
        ]
        if imported and module != COMPILED_TOO:
            found[module] = [node for node in imported if node in tree.body]
    assert found == {importer: []}


def _imports(node: ast.ImportFrom, name: str) -> bool:
    return name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))

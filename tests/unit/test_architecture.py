"""Imports point down only. These tests read every import statement under tlt/, those inside functions and for
type checkers included.

A module may import its own folder and lower floors, nothing beside it and nothing above. `tlt` itself and
`python -m tlt` stand above everything: the first hands public names on, the second starts the command line.
"""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

import tlt

ROOT = Path(tlt.__file__).parent

FLOORS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            {"accounts", "clock", "kinds", "loops", "spans", "uploads"},
            {"types"},
            {"io", "speculative"},
            {"audit", "config", "launch", "report", "tasks", "tuning"},
            {"models", "rewards"},
            {"engine", "hf", "ranks"},
            {"drafter", "rl"},
            {"rollout", "vllm"},
            {"assembly", "saved"},
            {"plan"},
            {"training"},
            {"api", "bench", "integrations", "page"},
            {"cli"},
        ),
    )
)
HEIGHT = {part: height for height, floor in enumerate(FLOORS) for part in floor}
ABOVE_ALL = {"__init__", "__main__"}


def find_violations(module: str, source: str) -> list[str]:
    """The imports in `source` that its place forbids. `module` is dotted, such as "tlt.engine.engine"."""
    part = _part(module)
    found = []
    for line, target in _imported_parts(module, source):
        if target not in HEIGHT:
            found.append(
                f"{module}:{line} imports tlt.{target}, which stands on no floor: give it one in "
                f"{Path(__file__).name}"
            )
        elif target == part:
            continue
        elif HEIGHT[target] > HEIGHT[part]:
            found.append(f"{module}:{line} imports upwards: {part} → {target}")
        elif HEIGHT[target] == HEIGHT[part]:
            found.append(f"{module}:{line} imports a sibling: {part} → {target}")
    return found


def _part(module: str) -> str:
    return module.split(".")[1]


def _imported_names(module: str, source: str) -> list[tuple[int, str]]:
    """(line, dotted name) of everything imported, those for type checkers and inside functions included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def _imported_parts(module: str, source: str) -> list[tuple[int, str]]:
    """(line, part) of everything imported from the package; `tlt` itself, its version, is no part."""
    names = _imported_names(module, source)
    return [
        (line, name.split(".")[1])
        for line, name in names
        if name.startswith("tlt.") and not name.startswith("tlt.__")
    ]


def find_circle(modules: dict[str, str]) -> list[str]:
    """Modules that import each other, the first one again at the end; none: there is no circle. modules:
    name to source."""

    def file_of(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]

    graph = {
        module: {file_of(name) for _, name in _imported_names(module, source)}
        & modules.keys() - {module, "tlt"}
        for module, source in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
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


def test_every_module_stands_on_a_floor() -> None:
    parts = {_part(module) for module in _modules()} - ABOVE_ALL
    assert parts <= set(HEIGHT), f"on no floor: {sorted(parts - set(HEIGHT))}"


def test_imports_point_down_only() -> None:
    modules = {module: source for module, source in _modules().items() if _part(module) not in ABOVE_ALL}
    assert len(modules) > 10
    violations = [line for module, source in modules.items() for line in find_violations(module, source)]
    assert violations == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert (
        find_circle(
            {module: source for module, source in _modules().items() if _part(module) not in ABOVE_ALL}
        )
        == []
    )


def test_a_circle_is_found_behind_type_checkers_and_inside_functions() -> None:
    modules = {
        "tlt.a": "if TYPE_CHECKING:\n    from tlt.b import B\n",
        "tlt.b": "def f():\n    from tlt import c\n",
        "tlt.c": "from tlt.a import A\n",
        "tlt.d": "from tlt.a import A\n",
    }
    assert set(find_circle(modules)) == {"tlt.a", "tlt.b", "tlt.c"}
    assert find_circle({**modules, "tlt.c": "import torch\n"}) == []


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
    assert _imported_parts("tlt.__init__", ast.unparse(tree)) == []
    assert told == tlt._HOMES


def test_an_upward_import_is_found_even_inside_a_function() -> None:
    source = "import torch\n\ndef f():\n    from tlt.engine.engine import RolloutEngine\n    return RolloutEngine\n"
    assert find_violations("tlt.speculative.verify", source) == [
        "tlt.speculative.verify:4 imports upwards: speculative → engine"
    ]


def test_a_sibling_import_is_found_in_each_of_its_spellings() -> None:
    expected = ["tlt.hf.weights:1 imports a sibling: hf → engine"]
    for source in (
        "import tlt.engine.prefill",
        "from tlt.engine import prefill",
        "from tlt import engine",
        "from ..engine import x",
    ):
        assert find_violations("tlt.hf.weights", source) == expected, source


def test_downward_and_own_package_imports_are_allowed() -> None:
    lines = (
        "from tlt.types import Rollout",
        "from tlt.models.decoder import X",
        "from . import cache",
        "import tlt.engine.noise",
    )
    source = "\n".join(lines)
    assert find_violations("tlt.engine.engine", source) == []


def test_a_part_on_no_floor_is_found() -> None:
    (message,) = find_violations("tlt.engine.engine", "import tlt.utils")
    assert "tlt.utils, which stands on no floor" in message


def test_what_runs_inside_vllm_knows_nothing_of_what_drives_it() -> None:
    inside = {module: source for module, source in _modules().items() if module.startswith(f"{INSIDE}.")}
    assert len(inside) > 5
    drivers = [
        name for module, source in inside.items() for name in _imported(source) if name.startswith("tlt.vllm")
    ]
    assert [name for name in drivers if not name.startswith(INSIDE)] == []


INSIDE = "tlt.vllm.inside"


def _imported(source: str) -> list[str]:
    """Names of modules that are imported anywhere in a source."""
    nodes = list(ast.walk(ast.parse(source)))
    return [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names] + [
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


def test_the_mathematics_of_losslessness_imports_torch_and_types_only() -> None:
    """Whoever checks speculative/ needs no other part of the package."""
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
        if _part(module) != "speculative":
            continue
        for node in ast.walk(ast.parse(source)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            also = COMPILED_WITH.get(module, set())
            assert {name.split(".")[0] for name in names} <= allowed | also, f"{module} imports {names}"


COMPILED_WITH = {
    "tlt.speculative.fused": {"triton"},
    "tlt.speculative.compiled": {"numba", "numpy", "concurrent"},
}


@pytest.mark.parametrize(
    ("compiled", "importer"),
    [
        ("tlt.speculative.fused", "tlt.speculative.sampling"),
        ("tlt.speculative.compiled", "tlt.speculative.draw"),
    ],
)
def test_what_a_package_compiles_is_imported_by_a_function_alone_so_that_all_works_without_it(
    compiled: str, importer: str
) -> None:
    found = {}
    for module, source in _modules().items():
        tree = ast.parse(source)
        imported = [
            node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and _imports(node, compiled)
        ]
        if imported:
            found[module] = [node for node in imported if node in tree.body]
    assert found == {importer: []}


def _imports(node: ast.ImportFrom, name: str) -> bool:
    return name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))

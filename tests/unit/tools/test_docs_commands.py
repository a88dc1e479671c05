"""Every `tlt` command on a page is one that the command line takes; its Python compiles, its keys are known."""

from __future__ import annotations

import ast
import importlib.util
import tomllib
from pathlib import Path

import tlt
from tlt.base.config.mistakes import section_of
from tlt.base.config.schema import Config
from tools.docs_commands import all_commands, mistakes_of, pages, programs_of

ROOT = Path(__file__).parents[3]
COMMANDS = [shown for shown in all_commands(ROOT) if shown.words[:1] == ["tlt"]]


def test_every_command_on_a_page_is_read_by_the_command_line() -> None:
    assert len([shown for shown in COMMANDS if shown.is_whole]) > 60
    assert [line for shown in COMMANDS for line in mistakes_of(shown)] == []


def test_python_on_a_page_compiles_and_imports_what_exists() -> None:
    found = [
        (page, code) for page, text in pages(ROOT) for kind, code in programs_of(text) if kind == "python"
    ]
    assert len(found) > 5
    for page, code in found:
        for node in ast.walk(ast.parse(code, page)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tlt"):
                assert importlib.util.find_spec(str(node.module)), (page, node.module)
            is_ours = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if is_ours and node.value.id == "tlt":
                assert node.attr in tlt.__all__, (page, node.attr)


def test_configuration_on_a_page_has_known_keys() -> None:
    found = [(page, code) for page, text in pages(ROOT) for kind, code in programs_of(text) if kind == "toml"]
    assert len(found) > 5
    unknown = [
        f"{page}: {section}.{key}"
        for page, code in found
        for section, keys in tomllib.loads(code).items()
        for key in keys
        if section not in Config.model_fields or key not in section_of(Config, section).model_fields
    ]
    assert unknown == []

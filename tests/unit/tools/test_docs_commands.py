"""Every `tlt` command on a page is one that the command line takes; its Python compiles, its keys are known."""

from __future__ import annotations

import ast
import importlib.util
import tomllib
from pathlib import Path

import pytest

import tlt
from tlt.base.config.mistakes import section_of
from tlt.base.config.schema import Config
from tools.docs_commands import Shown, all_commands, commands_of, mistakes_of, pages, programs_of

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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tlt trian countdown", "unknown command"),
        ("tlt train countdown --run.num_step 3", "--run.num_step is unknown"),
        ("tlt train countdown --rnu.seed 3", "--rnu.seed is unknown"),
        ("tlt generate MODEL --prompts p.jsonl", "needs --out"),
        ("tlt task countdown --num many --out p.jsonl", "--num: is many"),
        ("tlt drafter eval DIR --model M --prompts P [--deepness 3]", "--deepness is unknown"),
    ],
)
def test_a_command_that_would_be_refused_is_found(text: str, message: str) -> None:
    (line,) = mistakes_of(Shown("docs/x.md", text))
    assert line.startswith("docs/x.md: tlt")
    assert message in line


def test_commands_are_found_in_blocks_and_in_text() -> None:
    text = "Use `tlt audit`:\n\n    tlt train a.toml \\\n        --run.seed 1   # note\n    cd x && tlt train y\n"
    found = [*commands_of("p.md", text)]
    assert [shown.text for shown in found] == [
        "tlt audit",
        "tlt train a.toml --run.seed 1",
        "cd x",
        "tlt train y",
    ]
    assert [shown.is_whole for shown in found] == [False, True, True, True]

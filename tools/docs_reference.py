"""The reference pages of the site, written from the code when the site is built.

    configuration   tlt/base/config/schema.py, as `tlt train --help` shows it
    commands        tlt/apps/cli/commands.py
    python          the public names of tlt/__init__.py
    metrics         the records of a step

Sources are parsed, not imported, where importing them would take torch.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import tlt
from tlt.apps.cli.commands import COMMANDS, FAMILIES
from tlt.apps.cli.help import option_groups, usage
from tlt.base.config.schema import Config

ROOT = Path(tlt.__file__).parent.parent
_RECORDS = {
    "": ("tlt/training/report/step_record.py", "StepRecord"),
    "rollout": ("tlt/base/records.py", "RolloutRecord"),
    "rollout.response_tokens": ("tlt/base/records.py", "LengthStats"),
    "rollout.turns": ("tlt/base/records.py", "TurnsRecord"),
    "rewards": ("tlt/base/records.py", "RewardSummary"),
    "update": ("tlt/base/records.py", "UpdateMetrics"),
    "drafter": ("tlt/base/records.py", "DrafterCheck"),
    "idle": ("tlt/base/records.py", "IdleRecord"),
    "speedup": ("tlt/base/records.py", "SpeedupPair"),
}
"""The records in a line of metrics.jsonl, by their key."""
_EVALUATION = ("tlt/training/saved/evaluations.py", "Evaluation")


def configuration() -> str:
    """Returns the page of every key of a run's configuration."""
    parts = [
        "# Configuration",
        "Every key of a run's TOML file, with its values and default. On the command line a key is written "
        "`--section.key value`. This page is made from the code; `tlt train --help` shows the same.",
    ]
    for title, entries in option_groups(COMMANDS["train"].options, lists_keys=True):
        if title.startswith("["):
            name, _, about = title.partition("] ")
            parts += [f"## {name}]", about, *_keys(entries)]
    assert len([part for part in parts if part.startswith("## ")]) == len(Config.model_fields)
    return "\n\n".join(parts) + "\n"


def _keys(entries: Mapping[str, str]) -> Iterator[str]:
    for heading, text in entries.items():
        key, _, values = heading.removeprefix("--").partition(" ")
        yield f"### `{key}`"
        yield f"`{values}`{{ .values }} {plain(text)}"


def commands() -> str:
    """Returns the page of every command and option."""
    parts = [
        "# Commands and options",
        "This page is made from the code; `tlt COMMAND --help` shows the same. Examples and the files that a "
        "run writes: [commands](../commands.md).",
        *(f"**`tlt {family}`**: {about}" for family, about in FAMILIES.items()),
    ]
    for name, command in COMMANDS.items():
        about = inspect.cleandoc(command.options.__doc__ or "")
        parts += [f"## tlt {name}", f"```\n{usage(name, command.options)}\n```", plain(about)]
        for title, entries in option_groups(command.options, has_record=command.has_record):
            parts += [] if title == "Options:" else [f"*{plain(title)}*"]
            parts += [f"`{heading}`\n:   {plain(text)}" for heading, text in entries.items()]
        if command.lists_keys:
            parts.append(
                "Any key of the [configuration](configuration.md) is an option, too: `--section.key value`."
            )
    return "\n\n".join(parts) + "\n"


def metrics() -> str:
    """Returns the glossary of every figure that a run writes."""
    parts = [
        "# Every figure",
        "A step is a line of `metrics.jsonl`. Trackers get the same figures with `/` for `.`: "
        "`rollout/accept_length`. A figure that does not exist, such as the accept length of a step without "
        "verification, is null. Seconds are wall-clock seconds unless said otherwise. This page is made from "
        "the code.",
    ]
    for key, (file, name) in _RECORDS.items():
        parts += [f"## {key or 'The step'}", *_glossary(file, name, f"{key}." if key else "")]
    parts += ["## evaluations.jsonl", *_glossary(*_EVALUATION, "")]
    return "\n\n".join(parts) + "\n"


def _glossary(file: str, name: str, prefix: str) -> Iterator[str]:
    record = read_class(file, name)
    yield plain(record.about)
    rows = [
        f"| `{prefix}{field}` | {plain(text[:1].upper() + text[1:])} |"
        for field, text in record.fields.items()
        if prefix or field not in _RECORDS
    ]
    yield "\n".join(["| figure | meaning |", "|---|---|", *rows])


def python() -> str:
    """Returns the page of the public Python API."""
    parts = [
        "# Python API",
        "The names that `import tlt` gives. How to use them: [From Python](../python.md), "
        "[Beside another trainer](../embedding.md). This page is made from the code.",
    ]
    for module, names in tlt._HOMES.items():
        file = ROOT / (module.replace(".", "/") + ".py")
        body = ast.parse(file.read_text(encoding="utf-8")).body
        for node in body:
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef)
                and node.name in names
                and node.name != "Config"
            ):
                parts += [f"## tlt.{node.name}", *_described(node, node.name)]
    parts += [
        "## tlt.Config",
        "The configuration of a run: every key is in [Configuration](configuration.md).",
    ]
    return "\n\n".join(parts) + "\n"


def _described(node: ast.ClassDef | ast.FunctionDef, name: str) -> Iterator[str]:
    """Yields the parts of a class or function: its signature, its docstring, its public methods."""
    if isinstance(node, ast.FunctionDef):
        yield f"```python\n{_signature(node, name)}\n```"
        yield as_markdown(ast.get_docstring(node) or "")
        return
    record = Described(node)
    yield plain(record.about)
    kinds = {field: kind for field, kind, _ in _fields(node)}
    yield "\n".join(
        f"- `{field}: {kinds[field]}`{' — ' + plain(text) if text else ''}"
        for field, text in record.fields.items()
    )
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            yield f"### {name}.{child.name}"
            yield from _described(child, child.name)


def _signature(node: ast.FunctionDef, name: str) -> str:
    kinds = [ast.unparse(one) for one in node.decorator_list]
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = ast.unparse(node.args)
    lines = f"{name}({arguments}){result}"
    if len(lines) > 88:
        split = ",\n    ".join(re.split(r", (?![^\[]*\])", arguments))
        lines = f"{name}(\n    {split},\n){result}"
    return "\n".join([*(f"@{kind}" for kind in kinds), lines])


# ── records and their fields ────────────────────────────────────────────────────────────────────────────────


class Described:
    """A class as its source describes it: its purpose, and a text for each field, which stands under the
    field or as a line `name: text` of the class's docstring."""

    def __init__(self, node: ast.ClassDef) -> None:
        self.about, told = split_fields(ast.get_docstring(node) or "")
        self.fields = {
            field: " ".join(filter(None, (told.get(field, ""), under))) for field, _, under in _fields(node)
        }


def read_class(file: str, name: str) -> Described:
    """Returns a class of a source file, whose path starts at the repository's root."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return Described(next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name))


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yields (name, type, text under it) of each public field."""
    for child, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(child, ast.AnnAssign) or not isinstance(child.target, ast.Name):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split())
        if not child.target.id.startswith("_"):
            yield child.target.id, ast.unparse(child.annotation), text


_ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n    .*)*)", re.MULTILINE)


def split_fields(docstring: str) -> tuple[str, dict[str, str]]:
    """Returns a docstring's purpose, and its texts by name, of its lines `name: text` and `a, b: text`."""
    told: dict[str, str] = {}
    for found in _ENTRY.finditer(docstring):
        for name in found["names"].split(", "):
            told[name] = f"{told.get(name, '')} {' '.join(found['text'].split())}".strip()
    return " ".join(_ENTRY.sub("", docstring).split()), told


def as_markdown(docstring: str) -> str:
    """Returns a docstring as Markdown: its lines `name: text` become a list."""
    listed = _ENTRY.sub(lambda found: f"- `{found['names']}`: {' '.join(found['text'].split())}", docstring)
    return plain(listed)


def plain(text: str) -> str:
    """Returns text without a table, HTML or emphasis that nobody meant, and with docs/x.md as a link."""
    text = re.sub(r"docs/([\w-]+\.md)", r"[\1](../\1)", text)
    return re.sub(r"(?<!`)([<|*_])", r"\\\1", text) if "`" not in text else text.replace("|", "\\|")


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/configuration.md": configuration,
    "reference/commands.md": commands,
    "reference/python.md": python,
    "reference/metrics.md": metrics,
}

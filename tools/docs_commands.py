"""Finds the commands that the pages show, and reads each `tlt …` as the command line would.

    pages ── markdown-it ──▶ code blocks, code in text ── the option parser ──▶ mistakes

In a block a command is read whole. Of code in text, which may be a part such as `tlt audit`, names are read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from tlt.apps.cli.commands import COMMANDS, find_command
from tlt.apps.cli.options import WithOverrides, options_of, parse_options, split_rest, with_dashes
from tlt.base.config.mistakes import section_of
from tlt.base.config.schema import Config
from tlt.base.types import UserError

_OPTIONAL = re.compile(r"\[(--[^\]]*)\]")
"""An option that may be left out, as a synopsis shows it."""
_CHOICE = re.compile(r"(?<= )([\w-]+)(?:\|[\w-]+)+")


_COMMAND = re.compile(
    r"(?:\$ )?(tlt|make|pip|python|python3|cd|torchrun|sbatch|srun|vllm|hf|docker|PYTHONPATH=\S+) "
)


@dataclass(frozen=True)
class Shown:
    """A command on a page."""

    page: str
    text: str
    """As it is typed, on one line, without its comment."""
    is_whole: bool = True
    """Whether it stands in a block, not in text."""

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def typed(self) -> list[str]:
        """The words with all that may be left out, and the first of several choices."""
        return shlex.split(_OPTIONAL.sub(r"\1", _CHOICE.sub(r"\1", self.text)))


def commands_of(page: str, text: str) -> Iterator[Shown]:
    """Yields the commands that a page shows, in its order."""
    for token in MarkdownIt().parse(text):
        if token.type in ("code_block", "fence") and token.info in ("", "bash", "sh"):
            for line in token.content.replace("\\\n", " ").splitlines():
                yield from (Shown(page, part) for part in _parts(line))
        elif token.type == "inline":
            for child in token.children or ():
                if child.type == "code_inline" and child.content.startswith("tlt "):
                    yield Shown(page, " ".join(child.content.split()), is_whole=False)


def programs_of(text: str) -> Iterator[tuple[str, str]]:
    """Yields (language, code) of each block that is Python or a piece of a configuration, without the
    commands in it."""
    for token in MarkdownIt().parse(text):
        if token.type not in ("code_block", "fence"):
            continue
        if re.search(r"^(import|from|def|class) \w", token.content, re.MULTILINE):
            lines = token.content.splitlines()
            yield "python", "\n".join(line for line in lines if not _COMMAND.match(line))
        elif re.match(r"\[[a-z]+\]\n", token.content):
            yield "toml", token.content


def _parts(line: str) -> Iterator[str]:
    """Yields the commands of a line, such as `cd x && tlt …`, without a comment."""
    if not _COMMAND.match(line):
        return
    line = line.removeprefix("$ ")
    line = re.split(r"\s+#\s|\s{4,}(?=\w+ \w+)", line)[0]
    yield from (" ".join(part.split()) for part in line.split(" && "))


def mistakes_of(shown: Shown) -> list[str]:
    """Returns what the command line would refuse in a `tlt` command."""
    text = _CHOICE.sub(r"\1", shown.text)
    optional = [word for part in _OPTIONAL.findall(text) for word in part.split()]
    words = [word for word in shlex.split(_OPTIONAL.sub("", text))[1:] if word not in ("…", "...")]
    if not words or words == ["--help"] or words[0] in ("--version", "COMMAND"):
        return []
    try:
        name, rest = find_command(words)
        rest, _ = COMMANDS[name].split_json(rest)
        if shown.is_whole and "…" not in text:
            parse_options(name, COMMANDS[name].options, rest)
    except UserError as error:
        return [f"{shown}: {error}"] if shown.is_whole or not _is_family(words) else []
    return [f"{shown}: {wrong} is unknown" for wrong in _unknown(name, [*rest, *optional])]


def _is_family(words: Sequence[str]) -> bool:
    return len(words) == 1 and any(name.startswith(f"{words[0]} ") for name in COMMANDS)


def _unknown(name: str, words: Sequence[str]) -> Iterator[str]:
    """Yields options and keys that the command does not have."""
    kind = COMMANDS[name].options
    known = {with_dashes(option) for option in options_of(kind)}
    for word in split_rest(words)[0]:
        if not word.startswith("--") or word == "--help":
            continue
        option = word.removeprefix("--").partition("=")[0]
        section, dot, key = option.partition(".")
        if dot and issubclass(kind, WithOverrides):
            is_key = section == "section" or (
                section in Config.model_fields
                and key.partition(".")[0] in section_of(Config, section).model_fields
            )
            if not is_key:
                yield word
        elif option not in known:
            yield word


def pages(root: Path) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of the pages whose commands are checked: README.md, CONTRIBUTING.md, docs/ and the
    recipes' pages."""
    found = [
        root / "README.md",
        root / "CONTRIBUTING.md",
        *root.glob("docs/**/*.md"),
        *root.glob("recipes/*/*.md"),
    ]
    for path in sorted(found):
        yield str(path.relative_to(root)), path.read_text(encoding="utf-8")


def all_commands(root: Path) -> list[Shown]:
    """Returns every command of every page."""
    return [shown for page, text in pages(root) for shown in commands_of(page, text)]

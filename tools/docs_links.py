"""Which files of the repository are pages of the site, and where their links lead there.

    docs/rollout.md ── ../benchmarks/results/cost.md ──▶ a page, too
                    ── ../tlt/apps/plan/memory.py    ──▶ the repository's address, or text where it has none

A page is a file of docs/, README.md (the first page), or any Markdown file that a page links to. So a link is
written for GitHub, and works on the site as well.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

FIRST = "README.md"
"""The file that is the site's first page."""
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_IMAGES = (".svg", ".png")


@functools.cache
def pages_of(root: Path) -> dict[str, str]:
    """Returns the site's files by their addresses on it, pages and images: path from the repository's root →
    address."""
    left = [*sorted(str(path.relative_to(root)) for path in (root / "docs").rglob("*.md")), FIRST]
    found: dict[str, str] = {}
    while left:
        name = left.pop()
        if name in found or not (root / name).is_file():
            continue
        found[name] = "index.md" if name == FIRST else name.removeprefix("docs/")
        if name.endswith(".md"):
            linked = (
                target(name, link) for _, _, link in links_of((root / name).read_text(encoding="utf-8"))
            )
            left += [path for path in linked if path is not None and path.endswith((".md", *_IMAGES))]
    return found


def links_of(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields (! for an image, text, address) of each link outside code."""
    for found in _LINK.finditer(_FENCE.sub("", text)):
        yield found[1], found[2], found[3]


def target(name: str, link: str) -> str | None:
    """Returns the path that a link in the file `name` means, from the repository's root; None: it leads out
    of the repository, or stays within the page."""
    path = link.partition("#")[0]
    if not path or "://" in path or path.startswith(("mailto:", "/")):
        return None
    found = os.path.normpath(os.path.join(os.path.dirname(name), path))
    return None if found.startswith("..") else found


def rewrite(name: str, text: str, pages: dict[str, str], repository: str) -> str:
    """Returns a page's Markdown with its links as the site needs them.

    name: the page's path in the repository.
    repository: the address of the repository's files, such as https://github.com/OWNER/NAME/blob/main; empty:
        it has none, and what is no page becomes its path in code.
    """
    here = os.path.dirname(pages[name])

    def replaced(found: re.Match[str]) -> str:
        image, label, link = found.groups()
        path = target(name, link)
        if path is None:
            return found[0]
        anchor = link[len(link.partition("#")[0]) :]
        if path in pages:
            return f"{image}[{label}]({os.path.relpath(pages[path], here or '.')}{anchor})"
        return f"{image}[{label}]({repository}/{path})" if repository else _named(label, path)

    return _outside_code(text, lambda part: _LINK.sub(replaced, part))


def _named(label: str, path: str) -> str:
    return f"`{path}`" if label.strip("`") == path else f"{label} (`{path}`)"


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Applies `change` to the text between fenced blocks."""
    parts, end = [], 0
    for found in _FENCE.finditer(text):
        parts += [change(text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, change(text[end:])])

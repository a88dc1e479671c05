"""Links of the pages lead somewhere, on GitHub and on the site."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tools.docs_links import links_of, pages_of, rewrite, target

ROOT = Path(__file__).parents[3]
PAGES = {"README.md": "index.md", "docs/a.md": "a.md", "benchmarks/results/r.md": "benchmarks/results/r.md"}


def test_every_link_of_a_page_leads_to_a_file() -> None:
    names = [name for name in pages_of(ROOT) if name.endswith(".md")]
    assert len(names) > 60
    broken = [
        f"{name}: {link}"
        for name in names
        for _, _, link in links_of((ROOT / name).read_text(encoding="utf-8"))
        if (path := target(name, link)) is not None and not (ROOT / path).exists()
    ]
    assert broken == []


def test_every_page_of_docs_stands_in_the_navigation_once() -> None:
    # The configuration has no tags of MkDocs' own, which this loader would refuse.
    navigation = json.dumps(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    listed = re.findall(r"[\w/-]+\.md", navigation)
    assert sorted(set(listed)) == sorted(listed)
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - set(listed) == set()


@pytest.mark.parametrize(
    ("name", "link", "site", "repository"),
    [
        ("docs/a.md", "../benchmarks/results/r.md#x", "benchmarks/results/r.md#x", ""),
        ("docs/a.md", "../README.md", "index.md", ""),
        ("README.md", "docs/a.md", "a.md", ""),
        ("benchmarks/results/r.md", "../../docs/a.md", "../../a.md", ""),
        ("docs/a.md", "../tlt/apps/api.py", "https://x.y/blob/main/tlt/apps/api.py", "https://x.y/blob/main"),
        ("docs/a.md", "https://z.org/", "https://z.org/", ""),
        ("docs/a.md", "#words", "#words", ""),
    ],
)
def test_a_link_is_rewritten_for_the_site(name: str, link: str, site: str, repository: str) -> None:
    assert rewrite(name, f"See [it]({link}).", PAGES, repository) == f"See [it]({site})."


def test_a_file_without_a_page_is_named_where_no_repository_is_known() -> None:
    text = "[the code](../tlt/apps/api.py), [`tlt/apps/api.py`](../tlt/apps/api.py)\n\n```\n[x](../tlt/apps/api.py)\n```\n"
    shown = "the code (`tlt/apps/api.py`), `tlt/apps/api.py`\n\n```\n[x](../tlt/apps/api.py)\n```\n"
    assert rewrite("docs/a.md", text, PAGES, "") == shown

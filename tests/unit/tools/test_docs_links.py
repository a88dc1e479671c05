"""Links of the pages lead somewhere, on GitHub and on the site."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from tools.docs_links import links_of, pages_of, target

ROOT = Path(__file__).parents[3]


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

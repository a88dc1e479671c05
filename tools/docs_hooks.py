"""What MkDocs does beyond its configuration (mkdocs.yml): README.md as the first page, linked pages outside
docs/, the reference pages, and each page as plain Markdown with an llms.txt that lists them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from tools.docs_links import pages_of, rewrite
from tools.docs_reference import PAGES

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that docs/ does not hold."""
    for name, address in pages_of(ROOT).items():
        if not name.startswith("docs/"):
            files.append(File.generated(config, address, abs_src_path=str(ROOT / name)))
    for address, make in PAGES.items():
        files.append(File.generated(config, address, content=make()))
    return files


def on_nav(nav: Navigation, config: Any, files: Files) -> Navigation:
    """Keeps the navigation for llms.txt."""
    config.extra["nav"] = nav
    return nav


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Rewrites a page's links, and keeps the Markdown for its plain copy."""
    pages = pages_of(ROOT)
    name = {address: path for path, address in pages.items()}.get(page.file.src_uri)
    repository = f"{config.repo_url.rstrip('/')}/blob/main" if config.repo_url else ""
    shown = markdown if name is None else rewrite(name, markdown, pages, repository)
    config.extra.setdefault("plain", {})[page.file.src_uri] = shown
    if page.file.src_uri.startswith("benchmarks/"):
        page.meta["search"] = {"boost": 0.1}  # below the pages that say how to do it
    return shown


def on_post_build(config: Any) -> None:
    """Writes each page's Markdown beside it, and llms.txt."""
    folder = Path(config.site_dir)
    for address, text in config.extra["plain"].items():
        (folder / address).parent.mkdir(parents=True, exist_ok=True)
        (folder / address).write_text(text, encoding="utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += _listed(config.extra["nav"].items)
    (folder / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _listed(items: list[Any]) -> Iterator[str]:
    """Yields a line for each section and page of the navigation."""
    for item in items:
        if item.is_page:
            yield f"- [{item.title}]({item.file.src_uri})"
        elif item.is_section:
            yield from ["", f"## {item.title}", "", *_listed(item.children)]

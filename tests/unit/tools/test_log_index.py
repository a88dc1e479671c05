"""The log of experiments begins with a line for each entry."""

from __future__ import annotations

from tools.log_index import LOG, with_index


def test_the_logs_index_names_each_entry() -> None:
    text = LOG.read_text(encoding="utf-8")
    assert with_index(text) == text, "run python -m tools.log_index"

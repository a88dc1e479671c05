"""The committed pictures are those that the script draws of the committed results."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from tools.docs_pictures import PICTURES, RUNNING, running


def test_the_picture_of_the_long_tail_shows_the_committed_result() -> None:
    report = json.loads(RUNNING.read_text())
    drawn = running(report)
    assert drawn == (PICTURES / "running.svg").read_text()
    for found in report["rollouts"].values():
        assert f">{found['seconds']:.1f} s<" in drawn


def test_pictures_are_small_and_load_nothing() -> None:
    for path in PICTURES.glob("*.svg"):
        text = path.read_text()
        ElementTree.fromstring(text)
        assert len(text) < 100_000, path
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), path

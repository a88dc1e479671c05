"""The committed pictures are those that the script draws of the committed results."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from tools.docs_pictures import PAIRS, PICTURES, ROOT, screen, steps, terminal


def test_the_picture_of_a_step_shows_the_committed_results() -> None:
    results = ROOT / "benchmarks" / "results"
    reports = [(json.loads((results / f"{file}.json").read_text()), run, title) for file, run, title in PAIRS]
    drawn = steps(reports)
    assert drawn == (PICTURES / "steps.svg").read_text()
    for report, run, _ in reports:
        for name in ("off", run):
            assert f">{report['runs'][name]['step_seconds']:.1f} s<" in drawn


def test_pictures_are_small_and_load_nothing() -> None:
    for path in PICTURES.glob("*.svg"):
        text = path.read_text()
        ElementTree.fromstring(text)
        assert len(text) < 100_000, path
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), path


def test_a_screen_has_what_was_not_written_over() -> None:
    log = "\x1b[?25lloading\r\x1b[2Kready\r\n\x1b[36mone\x1b[0m 1\r\r\nspin\r\x1b[2K\x1b[1A\x1b[2Ktwo\r\nend\rEND"
    assert screen(log) == "ready\ntwo\nEND"


def test_a_terminal_keeps_its_colours_and_brings_no_font_along() -> None:
    drawn = terminal("\x1b[32msolved\x1b[0m 62 % & more", "tlt train", width=40)
    assert "solved" in drawn
    assert "@font-face" not in drawn
    assert "tlt&#160;train" in drawn

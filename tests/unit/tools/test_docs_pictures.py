"""The committed pictures are those that the script draws of the committed results."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

from tools.docs_pictures import LEFT, PICTURES, RIGHT, RUNNING, TRAINS, WIDTH, running, screen, terminal


def test_the_picture_of_the_long_tail_shows_the_committed_result() -> None:
    report = json.loads(RUNNING.read_text())
    drawn = running(report)
    assert drawn == (PICTURES / "running.svg").read_text()
    for found in report["rollouts"].values():
        assert f">{found['seconds']:.1f} s<" in drawn


def test_a_curve_keeps_its_height_until_the_number_changes_and_idle_training_is_marked() -> None:
    rollouts = {
        "off": {"seconds": 4.0, "running": [[0.0, 2], [1.0, 1], [4.0, 0]], "ranks": [[["waits", 0.0, 4.0]]]},
        "tlt": {"seconds": 2.0, "running": [[0.0, 2], [2.0, 0]], "ranks": [[["trains", 1.0, 2.0]]]},
    }
    drawn = running({"num_responses": 2, "rollouts": rollouts})
    second = (WIDTH - LEFT - RIGHT) / 4
    paths = re.findall(r'path d="(.*?)"', drawn)
    assert [path.count("V") for path in paths] == [3, 2]
    assert paths[0].endswith(f"H{LEFT + second:.1f}V114.0H{LEFT + 4 * second:.1f}V166.0Z")
    assert re.findall(rf'x="([\d.]+)".*width="([\d.]+)" height="11" fill="{TRAINS}"', drawn)[1:] == [
        (f"{LEFT + second:.1f}", f"{second:.1f}")
    ]


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

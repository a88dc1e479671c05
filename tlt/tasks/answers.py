r"""Finds the answer that a text gives.

boxed     the last \boxed{…} that is closed
marked    the last of \boxed{…}, `#### …` (GSM8K) and `Answer: …` (DAPO), whichever ends the text
any       marked, else the last number
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

Search = Literal["boxed", "marked", "any"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s+([^\s${}]+)")
_MARK = re.compile(r"####[ \t]*([^\n]+)|(?i:\banswer)\**\s*:[ \t]*\**[ \t]*([^\n]+)")
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-\u2212])?(?<![\d.])(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?(?!\d)"
)  # with every comma between its digits: `to_number` says whether these separate thousands


def find_answer(text: str, search: Search = "marked") -> str | None:
    start, answer = _last_boxed(text)
    if search == "boxed":
        return answer
    for mark in _MARK.finditer(text):
        if mark.end() > start and not _BOX.search(mark[0]):  # a box in the marked line is the answer
            start, answer = mark.start(), _bare(mark[1] or mark[2])
    if answer is None and search == "any":
        numbers = _NUMBER.findall(text)
        answer = numbers[-1] if numbers else None
    return answer


def _last_boxed(text: str) -> tuple[int, str | None]:
    """Returns (start, content), or (-1, None)."""
    boxes = {box.end(): box.start() for box in _BOX.finditer(text)}
    closed = [(boxes[opens], text[opens + 1 : ends]) for opens, ends in _braces(text) if opens in boxes]
    if closed:
        start, content = max(closed)
        return start, content.strip()
    bare = list(_BARE_BOX.finditer(text))  # `\boxed 5`, as some solutions of MATH have it
    return (bare[-1].start(), bare[-1][1]) if bare else (-1, None)


def _braces(text: str) -> Iterator[tuple[int, int]]:
    """Positions of `{` and of the `}` that closes it, without those behind a backslash."""
    opened = list[int]()
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            yield opened.pop(), brace.start()


def _bare(answer: str) -> str:
    return answer.strip().strip("*").strip().removesuffix(".").strip()

"""A way to speculate. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from tlt.base.types import UserError


@dataclass(frozen=True)
class Strategy:
    """A way to speculate. `Strategy.OFF` decodes without drafts.

    drafter: learned, ngram, hybrid, ahead (from references) or ahead+KIND (KIND without a reference); empty:
        not chosen yet.
    depth: drafting steps, one per level: the depth of the deepest node.
    width: candidates per node.
    budget: most drafted nodes, the root (the last committed token) excluded.
    """

    drafter: str
    depth: int
    width: int
    budget: int

    OFF: ClassVar[Strategy]
    MAX_DEPTH: ClassVar[int] = 32
    """Most drafting steps of a drafter."""
    MAX_REFERENCE: ClassVar[int] = 256
    """Most tokens drafted from a reference in a step."""
    WITHOUT_REFERENCE: ClassVar[int] = 8
    """Most tokens drafted for a sequence without a reference, in a step in which others have one."""

    def __post_init__(self) -> None:
        limit = self.MAX_REFERENCE if self.uses_references else self.MAX_DEPTH
        if self.depth > limit:
            raise UserError(f"strategy {self}: depth {self.depth} is too large; give at most {limit}")
        if self.uses_references and self.width > 1:
            raise UserError(
                f"strategy {self}: a reference is a chain; give {self.drafter}:{self.depth}x1x{self.depth}"
            )
        if self.depth < 0 or self.width < 0 or self.budget < 0:
            raise UserError(f"strategy {self}: depth, width and budget must not be negative")
        if self.depth and not (self.width >= 1 and self.depth <= self.budget):
            chain = f"{self.depth}x1x{self.depth}"
            raise UserError(f"strategy {self}: needs width >= 1 and budget >= depth; for a chain use {chain}")

    @property
    def is_off(self) -> bool:
        return self.depth == 0

    @property
    def uses_references(self) -> bool:
        return self.drafter.partition("+")[0] == "ahead"

    @property
    def without_reference(self) -> Strategy:
        if not self.uses_references:
            return self
        kind, depth = self.drafter.partition("+")[2], min(self.depth, self.WITHOUT_REFERENCE)
        return Strategy(kind, depth, 1, depth) if kind else Strategy.OFF

    def __str__(self) -> str:
        shape = f"{self.depth}x{self.width}x{self.budget}"
        return "off" if self.is_off else f"{self.drafter}:{shape}" if self.drafter else shape

    @staticmethod
    def parse(text: str, drafter: str = "learned") -> Strategy:
        """Parses `off`, `DEPTHxWIDTHxBUDGET` or `DRAFTER:DEPTHxWIDTHxBUDGET`; `drafter` is the default."""
        if text == "off":
            return Strategy.OFF
        name, _, shape = text.rpartition(":")
        parts = shape.split("x")
        if len(parts) != 3 or not all(re.fullmatch("[0-9]{1,9}", part) and int(part) > 0 for part in parts):
            remedy = "give off, adaptive or DEPTHxWIDTHxBUDGET such as 4x1x4"
            raise UserError(f"speculation: {text!r} is no strategy; {remedy}")
        depth, width, budget = map(int, parts)
        return Strategy(name or drafter, depth, width, budget)


Strategy.OFF = Strategy("none", 0, 0, 0)

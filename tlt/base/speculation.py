"""What a user asks of speculation: off, adaptive, or a fixed strategy. Imports no torch and no pydantic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tlt.base.strategy import Strategy


@dataclass(frozen=True)
class Off:
    def __str__(self) -> str:
        return "off"


@dataclass(frozen=True)
class Adaptive:
    def __str__(self) -> str:
        return "adaptive"


@dataclass(frozen=True)
class Fixed:
    strategy: Strategy
    """Its drafter is empty where the user names none."""

    def __str__(self) -> str:
        return str(self.strategy)

    def drafted_by(self, preferred: str) -> Strategy:
        """preferred: the kind of drafter where the user names none."""
        return self.strategy if self.strategy.drafter else replace(self.strategy, drafter=preferred)


Speculation = Off | Adaptive | Fixed


def parse_speculation(text: str) -> Speculation:
    """Raises UserError."""
    match text:
        case "off":
            return Off()
        case "adaptive":
            return Adaptive()
    return Fixed(Strategy.parse(text, drafter=""))

"""References of every kind for a response that is known: what a test drafts from where nothing may change
a token."""

from __future__ import annotations

import random
from collections.abc import Sequence

KINDS = (
    "right",
    "wrong",
    "one differs",
    "shifted",
    "truncated",
    "empty",
    "too long",
    "of another sample",
    "none",
)


def reference_of(
    kind: str,
    right: Sequence[int],
    other: Sequence[int],
    rng: random.Random,
    tokens: range,
    num_noise: int = 300,
) -> list[int] | None:
    """Returns a reference for a response, `right`; None: there is none. other: another sample's.
    tokens: that may be drawn."""
    middle, noise = len(right) // 2, rng.choices(tokens, k=num_noise)
    return {
        "right": list(right),
        "wrong": noise[: len(right)],
        "one differs": [
            *right[:middle],
            tokens[(right[middle] - tokens.start + 1) % len(tokens)],
            *right[middle + 1 :],
        ],
        "shifted": [*right[:middle], *noise[:3], *right[middle:]],
        "truncated": list(right[:middle]),
        "empty": [],
        "too long": [*right, *noise],
        "of another sample": list(other),
        "none": None,
    }[kind]

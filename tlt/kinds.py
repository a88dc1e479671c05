"""Kinds of values that users give, each declared once with its bounds: a configuration, a command and a
Python call check by the same declaration and say the same of a wrong one. Knows no place where a value
stands.

    MaxTokens ─┬─ pydantic ──▶ [sampling] of a file: sampling.max_tokens is 2.5; it must be a valid integer
               ├─ pydantic ──▶ tlt generate:          --max-tokens: is 2.5; it must be a valid integer
               └─ convert ───▶ engine.generate:       max_tokens: is 2.5; it must be a valid integer

Every number has an upper bound: beyond all sense, but below what torch, the system or the memory plan
would break at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

LONGEST_SHOWN = 80
"""Characters of a value that an error repeats."""

# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────

PositiveInt = Annotated[int, Ge(1), Le(2**31 - 1)]
NonNegativeInt = Annotated[int, Ge(0), Le(2**31 - 1)]
AnyFloat = Annotated[float, Ge(-1e9), Le(1e9)]
PositiveFloat = Annotated[float, Gt(0), Le(1e9)]
NonNegativeFloat = Annotated[float, Ge(0), Le(1e9)]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
ProperShare = Annotated[float, Ge(0), Lt(1)]

Gib = Annotated[float, Gt(0), Le(2**20)]
"""Memory of a device or of a part of it: up to a pebibyte, whose bytes are a float's whole numbers."""
Tokens = Annotated[float, Ge(1), Le(1e9)]
"""A mean or a quantile of numbers of tokens."""
Mib = Annotated[int, Ge(1), Le(2**30)]
Seconds = Annotated[float, Gt(0), Le(1e6)]
"""A time limit: up to eleven days. `poll` and sockets take 2^31 milliseconds at most, twice as many."""
Problems = Annotated[int, Ge(1), Le(2**24)]
Processes = Annotated[int, Ge(1), Le(2**16)]
Workers = Annotated[int, Ge(0), Le(1024)]
Threads = Annotated[int, Ge(1), Le(1024)]
BatchSize = Annotated[int, Ge(1), Le(2**16)]
Rank = Annotated[int, Ge(0), Le(2**16)]
"""Of an adapter, as LoRA has it."""
LearningRate = Annotated[float, Gt(0), Le(1e3)]
WeightDecay = Annotated[float, Ge(0), Le(1e3)]
Epsilon = Annotated[float, Ge(1e-20), Le(1)]
"""What Adam adds to a divisor; below it, in float32, a gradient that is all but 0 divided by it would be
infinite."""
CouplingTemperature = Annotated[float, Ge(1e-6), Le(1e6)]
"""Of a draft's ranking: its inverse is a factor of logits in float32."""
MOST_DRAFTED = 2**31 - 1
DraftVocab = Literal["auto", "full"] | Annotated[int, Ge(2), Le(MOST_DRAFTED)]
"""Tokens that a drafter proposes: a number of them, all, or as many as pay (drafter/vocabulary.py)."""

# ── sampling ────────────────────────────────────────────────────────────────────────────────────────────────

Temperature = Annotated[float, Ge(0), Le(1e6)]
TopK = Annotated[int, Ge(0), Le(2**31 - 1)]
TopP = PositiveShare
MinP = Share
MaxTokens = PositiveInt
Samples = Annotated[int, Ge(1), Le(2**16)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
StopText = Annotated[str, MinLen(1)]
StopTexts = tuple[StopText, ...]
StopIds = tuple[NonNegativeInt, ...]

# ── checked outside of a configuration ──────────────────────────────────────────────────────────────────────


def convert(value: object, kind: Any) -> Any:
    """Returns the value as one of a kind, made of Python's own numbers, texts and tuples (`plain`). Raises
    ValueError, "is VALUE; REMEDY", for what is none: True is no number, and neither is "1"."""
    from pydantic_core import (
        ValidationError,
    )  # here alone: reward workers, which import the nouns, start without it

    try:
        return _adapter(kind).validate_python(plain(value))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        raise ValueError(
            f"is {shorten(detail['input'] if detail['loc'] else value)}; {remedy(detail)}"
        ) from None


@cache
def kinds_of(record: type) -> Mapping[str, Any]:
    """Returns the kinds of a dataclass's fields."""
    return get_type_hints(record, include_extras=True)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def plain(value: Any) -> Any:
    """Returns NumPy's and torch's numbers and arrays as Python's, and collections as tuples; anything else
    as it is."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return value
    value = value.tolist() if hasattr(value, "tolist") else value
    return (
        tuple(plain(item) for item in value)
        if isinstance(value, Collection) and not isinstance(value, str)
        else value
    )


def remedy(detail: ErrorDetails) -> str:
    """Returns what pydantic asks for, as the end of our line."""
    message = detail["msg"]
    if detail["type"] == "mistake":
        return message
    message = message.replace("Input should be", "it must be", 1).replace("Value should", "it must", 1)
    message = message.replace("String should", "it must", 1)
    message = message.replace("Input is not a valid path for <class 'pathlib.Path'>", "it must be a path")
    message = message.partition(", unable to parse")[0].replace(
        "a valid dictionary", "a table such as '{key = 1}'"
    )
    message = message.replace("a valid tuple", "a list")
    return message[:1].lower() + message[1:]


def shorten(value: Any, limit: int = LONGEST_SHOWN) -> str:
    """Returns the value on one line of bounded length."""
    try:
        text = " ".join(repr(value).split())
    except (
        Exception
    ):  # whole numbers of thousands of digits have no text, and an object's own may fail in any way
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 1] + "…"

"""Types of users' values, each declared once with its bounds.

    MaxTokens ─┬─ pydantic ──▶ [sampling] of a file: sampling.max_tokens is 2.5; it must be a valid integer
               ├─ pydantic ──▶ tlt generate:          --max-tokens: is 2.5; it must be a valid integer
               └─ convert ───▶ engine.generate:       max_tokens: is 2.5; it must be a valid integer

Every number has an upper bound, below values that break torch, the system or the memory plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails, ValidationError

LONGEST_SHOWN = 80

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
KeptGib = Annotated[float, Ge(0), Le(2**20)]
"""Up to a pebibyte, whose number of bytes is exact in a float."""
Tokens = Annotated[float, Ge(1), Le(1e9)]
"""A mean or quantile of token counts."""
Seconds = Annotated[float, Gt(0), Le(1e6)]
"""A time limit: up to eleven days, half the 2^31 milliseconds that `poll` and sockets accept."""
Problems = Annotated[int, Ge(1), Le(2**24)]
Processes = Annotated[int, Ge(1), Le(2**16)]
Workers = Annotated[int, Ge(0), Le(1024)]
Threads = Annotated[int, Ge(1), Le(1024)]
BatchSize = Processes
Rank = Annotated[int, Ge(0), Le(2**16)]
"""A LoRA adapter's rank."""
BlockLayers = Annotated[int, Ge(1), Le(16)]
BlockLength = Annotated[int, Ge(1), Le(32)]
"""Tokens of a drafted block, at most Strategy.MAX_DEPTH."""
LearningRate = Annotated[float, Gt(0), Le(1e3)]
WeightDecay = Annotated[float, Ge(0), Le(1e3)]
Epsilon = Annotated[float, Ge(1e-20), Le(1)]
"""Adam's epsilon. In float32, smaller values turn tiny gradients into infinite updates."""
MOST_DRAFTED = 2**31 - 1
DraftVocab = Literal["auto", "full"] | Annotated[int, Ge(2), Le(MOST_DRAFTED)]
"""Size of a draft vocabulary; "auto": as many tokens as pay (drafter/vocabulary.py)."""

# ── sampling ────────────────────────────────────────────────────────────────────────────────────────────────

Temperature = Annotated[float, Ge(0), Le(1e6)]
TopK = NonNegativeInt
TopP = PositiveShare
MinP = Share
MaxTokens = PositiveInt
Samples = Processes
Seed = Annotated[int, Ge(0), Lt(2**63)]
StopText = Annotated[str, MinLen(1)]
StopTexts = tuple[StopText, ...]
StopIds = tuple[NonNegativeInt, ...]

# ── checked outside of a configuration ──────────────────────────────────────────────────────────────────────


def convert(value: object, kind: Any) -> Any:
    """Accepts NumPy's and torch's values; True and "1" are no numbers. ValueError says "is VALUE; REMEDY"."""
    from pydantic_core import ValidationError  # here, so that reward workers start without it

    try:
        return _adapter(kind).validate_python(plain(value))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        found = shorten(detail["input"] if detail["loc"] else value)
        raise ValueError(f"is {found}; {remedy(detail)}") from None


@cache
def types_of(record: type) -> Mapping[str, Any]:
    return get_type_hints(record, include_extras=True)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def plain(value: Any) -> Any:
    """Makes NumPy's and torch's numbers and arrays Python's, and collections tuples."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return value
    value = value.tolist() if hasattr(value, "tolist") else value
    is_collection = isinstance(value, Collection) and not isinstance(value, str)
    return tuple(plain(item) for item in value) if is_collection else value


_REMEDIES = {
    "Input should be": "it must be",
    "Value should": "it must",
    "String should": "it must",
    "Input is not a valid path for <class 'pathlib.Path'>": "it must be a path",
    "a valid dictionary": "a table such as '{key = 1}'",
    "a valid tuple": "a list",
}


def remedy(detail: ErrorDetails) -> str:
    message = detail["msg"]
    if detail["type"] == "mistake":
        return message
    message = message.partition(", unable to parse")[0]
    for theirs, ours in _REMEDIES.items():
        message = message.replace(theirs, ours, 1)
    return message[:1].lower() + message[1:]


def describe_mistakes(error: ValidationError) -> str:
    mistakes = error.errors(include_url=False)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'line'}: {one['msg']}" for one in mistakes)


def shorten(value: Any, limit: int = LONGEST_SHOWN) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # integers of thousands of digits have no repr, and an object's own may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 1] + "…"

"""Changes values and bytes at random, into what no program expects. Knows no command."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, 10**400, -(10**30), 0.0, -0.5, 1e-320, 1e308,
    math.nan, math.inf, "", " ", "none", "true", "1", "1e3", "off", "../../x", "./x", "~", ".", "\0",
    "a\0b", "a\nb", "\x1b[31m", "\ud800", "é" * 300, "😀", "\u202e", "x" * 5000, "%s{0}$HOME", "a:b",
    "tlt.x:y", "os:getcwd", "owner/name", "owner/name@main", [], [[]], [None], [1, "a", {}], {},
    {"a": {"b": [1]}}, {"": 1}, [0] * 2000, {"role": "user", "content": "1"},
)  # fmt: skip
BYTES = (
    b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\n\n\n", b"{", b'"', b"\\ud800", b"1e999",
    b"NaN", b"[" * 9000, b"9" * 5000, b"\r", b",",
)  # fmt: skip


def choices(text: str) -> tuple[str, ...]:
    """Returns the entries of a table in text: one from each line, or several between bars."""
    return tuple(entry for line in text.strip().splitlines() for entry in line.strip().split(" | "))


def mutated(value: Any, rng: random.Random) -> Any:
    """Returns nested lists and dicts with something replaced, removed, doubled, renamed or put in elsewhere."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = _mutated_once(value, rng)
    return value


def _mutated_once(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.05:
        return _near(value, rng) if rng.random() < 0.3 else rng.choice(ODD)
    key: Any = rng.choice([*value]) if isinstance(value, dict) else rng.randrange(len(value))
    match rng.randrange(8):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            names = (f"{key}s", str(key).upper(), "", "a.b", "\0", "é", "path", "prompt", "messages")
            value[rng.choice(names)] = value.pop(key)
        case 1 if isinstance(value, list):
            value.insert(key, value[key])
        case 2 if isinstance(value, dict):
            value[rng.choice((*value, "unknown"))] = rng.choice(ODD)
        case _:
            value[key] = _mutated_once(value[key], rng)
    return value


def _near(value: Any, rng: random.Random) -> Any:
    if isinstance(value, str):
        before, put_in = value[: rng.randrange(len(value) + 1)], rng.choice(("x", ":", "/", "-", "\t"))
        return before + put_in + value[rng.randrange(len(value) + 1) :]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return rng.choice((-value, value * 1000, value + 0.5, str(value), [value]))
    return [value]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Returns bytes of which some are changed, cut out, doubled, or put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        start = rng.randrange(len(out) + 1)
        end = min(len(out), start + rng.choice((1, 4, 64)))
        match rng.randrange(6):
            case 0:
                del out[start:]
            case 1:
                del out[start:end]
            case 2:
                out[start:start] = out[start:end]
            case 3:
                out[start:end] = rng.randbytes(end - start)
            case _:
                out[start:start] = rng.choice(BYTES)
    return bytes(out)


def to_toml(values: Mapping[str, Any]) -> str:
    """Returns TOML; what TOML has no word for is left to be refused."""
    lines = []
    for section, table in values.items():
        if isinstance(table, dict):
            lines += [f"[{_toml_key(section)}]", *(f"{_toml_key(key)} = {_toml(value)}" for key, value in table.items())]
        else:
            lines.insert(0, f"{_toml_key(section)} = {_toml(table)}")
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return json.dumps(key)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)

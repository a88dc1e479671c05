"""Changes values, bytes and files at random, into what no program expects: inputs of the fuzz,
checkpoints, journals. Knows no command."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
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
    """Returns nested lists and dicts with something replaced, removed, doubled, renamed or put in
    elsewhere."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = _mutated_once(
            json.loads(json.dumps(value)), rng
        )  # a copy: what was put in twice, or is of ODD, stays as it is
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


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────


def _flip(data: bytearray, at: slice, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, at: slice, rng: random.Random) -> None:
    del data[at.start :]


def _extend(data: bytearray, at: slice, rng: random.Random) -> None:
    data += rng.randbytes(rng.randint(1, 99))


def _zero(data: bytearray, at: slice, rng: random.Random) -> None:
    data[at] = bytes(len(data[at]))


def _fill(data: bytearray, at: slice, rng: random.Random) -> None:
    data[at] = rng.randbytes(len(data[at]))


def _remove(data: bytearray, at: slice, rng: random.Random) -> None:
    del data[at]


def _repeat(data: bytearray, at: slice, rng: random.Random) -> None:
    data[at.start : at.start] = data[at]


Damage = Callable[[bytearray, slice, random.Random], None]
DAMAGES: dict[str, Damage] = {
    "truncated": _cut, "extended": _extend, "bits flipped": _flip, "a block zeroed": _zero,
    "a block of noise": _fill, "a block missing": _remove, "a block repeated": _repeat,
}  # fmt: skip
"""Of a file's bytes, given a block of them."""


def damage(path: Path, kind: str, rng: random.Random) -> None:
    """Damages a file that is not empty, in one of the ways of `DAMAGES`."""
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    DAMAGES[kind](data, slice(start, start + rng.choice((1, 4, 64, 4096))), rng)
    path.write_bytes(data)


def exchange(one: Path, other: Path) -> None:
    """Gives each of two files or folders the other's name."""
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


# ── TOML ────────────────────────────────────────────────────────────────────────────────────────────────────


def to_toml(values: Mapping[str, Any]) -> str:
    """Returns TOML; what TOML has no word for is left to be refused."""
    lines = []
    for section, table in values.items():
        if isinstance(table, dict):
            keys = [f"{json.dumps(key)} = {_toml(value)}" for key, value in table.items()]
            lines += [f"[{json.dumps(section)}]", *keys]
        else:
            lines.insert(0, f"{json.dumps(section)} = {_toml(table)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)

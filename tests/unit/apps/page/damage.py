"""Damage to the files of a run, one value at a time, and what `tlt status` and `tlt report` make of it."""

from __future__ import annotations

import copy
import io
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.unit.apps.page.synthetic import make_coloured
from tlt.apps.cli.status import Status, run, summarize
from tlt.apps.cli.summary import to_grid
from tlt.apps.page.render import make_page
from tlt.base.io.files import dumps, write_jsonl
from tlt.base.types import UserError

ODD: tuple[str, ...] = (
    "null",
    "true",
    "-1",
    "0",
    "7",
    "0.5",
    "1e30",
    "1e300",
    "1e400",
    "-1e400",
    "NaN",
    "1" + "0" * 30,
    "-" + "9" * 400,
    '""',
    '"x"',
    '"\\u001b[31m\\u009b2J\\u202e"',
    "[]",
    "[1]",
    '["x", null]',
    "{}",
    '{"x": 1}',
    '{"": {"": []}}',
    "[" * 60 + "]" * 60,
    "[" * 100_000,
)
"""Values that stand in place of a right one, as JSON."""
MARK = "\u0000odd\u0000"
FILES = (
    "metrics.jsonl",
    "evaluations.jsonl",
    "environment.jsonl",
    "config.json",
    "timeline.rank0.jsonl",
    "responses/rollout-00000001.jsonl",
)


Damage = tuple[str, tuple[Any, ...], str]
"""A file, the path of a value in its first line, and the odd JSON in its place."""


def make_sound(folder: Path, make: Callable[[Path], Path] = make_coloured) -> Path:
    """Writes the folder of a run with every file that is read."""
    make(folder)
    write_jsonl(folder / "environment.jsonl", [{"began": 1.0, "cpu": "a machine", "ranks": 2}])
    return folder


def show_status(folder: Path) -> None:
    """Shows a run's status, as JSON and for people."""
    record = run(Status(run=folder))
    dumps(record)
    summary = summarize(record)
    Console(file=io.StringIO()).print(summary.headline, to_grid(summary.rows))


def show_page(folder: Path) -> None:
    """Makes a run's page."""
    make_page([folder])


def surprises(sound: Path, todo: Sequence[Damage], show: Callable[[Path], None]) -> list[str]:
    """Returns each damage at which `show` neither succeeds nor says one line."""
    found, folder = list[str](), sound.with_name("damaged")
    for one in todo:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        damage(folder, *one)
        try:
            show(folder)
        except UserError as error:
            if "\n" in str(error):
                found.append(f"{one}: several lines")
        except Exception as error:  # whatever it is, a user would see its traceback
            found.append(f"{one[:2]} {one[2][:40]}: {error!r}"[:300])
    return found


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value within a value, itself included."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def damages(folder: Path) -> list[Damage]:
    """Returns all damages."""
    found = []
    for name in FILES:
        text = (folder / name).read_text("utf-8")
        value = json.loads(text if name == "config.json" else text.splitlines()[0])
        found += [(name, at, odd) for at in places(value) for odd in ODD]
    return found


def damage(folder: Path, name: str, at: tuple[Any, ...], odd: str) -> None:
    """Puts the odd value in its place."""
    path = folder / name
    first, *rest = (
        [path.read_text("utf-8")] if name == "config.json" else path.read_text("utf-8").splitlines()
    )
    value = copy.deepcopy(json.loads(first))
    if at:
        inner = value
        for key in at[:-1]:
            inner = inner[key]
        inner[at[-1]] = MARK
    else:
        value = MARK
    path.write_text("\n".join([json.dumps(value).replace(json.dumps(MARK), odd), *rest]) + "\n", "utf-8")


def sample(folder: Path, count: int, seed: int) -> list[Damage]:
    """Returns so many damages, drawn evenly from the files."""
    draw, by_file = random.Random(seed), dict[str, list[Damage]]()
    for one in damages(folder):
        by_file.setdefault(one[0], []).append(one)
    return [draw.choice(by_file[draw.choice(FILES)]) for _ in range(count)]

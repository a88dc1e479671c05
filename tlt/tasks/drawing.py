"""Draws problems under PYTHONHASHSEED=0: libraries that iterate over sets then draw the same in every
process."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

from tlt.base.io.plugins import describe
from tlt.base.io.processes import this_python
from tlt.base.types import UserError


def draw_alike(place: str, function: str, *arguments: Any) -> Any:
    """Calls "module:name" in a process of its own, unless hashes are fixed here. Arguments and result are
    JSON. Raises UserError."""
    if not sys.flags.hash_randomization:
        mistake, drawn = _call(place, function, arguments)
    else:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        done = subprocess.run(
            [*this_python(), "-c", "from tlt.tasks.drawing import answer_parent; answer_parent()"],
            input=json.dumps([place, function, arguments], default=str),  # dates of TOML
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            what = f"the process that draws the problems ended with exit code {done.returncode}"
            remedy = "correct the task, or take another"
            raise UserError(f"{place}: {what}; {remedy}")
        mistake, drawn = json.loads(done.stdout)
    if mistake:
        raise UserError(mistake)
    return drawn


def answer_parent() -> None:
    """stdin has the arguments, stdout gets (mistake or "", drawn), stderr the task's prints."""
    out = os.dup(1)
    os.dup2(2, 1)
    answer = _call(*json.load(sys.stdin))
    with open(out, "w", encoding="utf-8") as stream:
        json.dump(answer, stream)


def _call(place: str, function: str, arguments: Any) -> tuple[str, Any]:
    module, _, name = function.partition(":")
    try:
        return "", getattr(importlib.import_module(module), name)(*arguments)
    except UserError as error:
        return str(error), None
    except (Exception, SystemExit) as error:  # generators and tasksets raise anything
        return (
            f"{place}: the problems cannot be drawn ({describe(error)}); correct the task, or task.options",
            None,
        )

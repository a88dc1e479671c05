"""Versions, commit and machine of a measurement or a run, without host names or paths."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tlt import __version__
from tlt.base.io.extras import version_of
from tlt.base.io.files import Record, parse_json, read_appended, write_jsonl

FILE = "environment.jsonl"
"""In a run's folder: a line for each start and resume."""
PACKAGES = ("transformers", "tokenizers", "safetensors", "numpy", "vllm")


def environment() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpus = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    changes = "+changes" if _git("status", "--porcelain", "tlt") else ""
    return {
        "tlt": __version__,
        "commit": _git("rev-parse", "--short", "HEAD") + changes,
        "cpu": f"{cpus[0]}, {len(cpus)} cores" if cpus else "unknown",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def append_environment(folder: Path, began: float, num_ranks: int) -> None:
    """began: Unix time."""
    record = {"began": began, "ranks": num_ranks, **_of_this_process()}
    write_jsonl(folder / FILE, [*read_environments(folder), record])


def read_environments(folder: Path) -> list[Record]:
    return read_appended(folder / FILE, _parse, "environment")


def _parse(line: str) -> Record:
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ValueError("it is no object")
    return record


@cache
def _of_this_process() -> Record:
    found = environment()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found |= {"memory": f"{memory / 2**30:.0f} GiB", "system": f"{platform.system()} {platform.machine()}"}
    return found | {name: number for name in PACKAGES if (number := version_of(name)) is not None}


def _git(*words: str) -> str:
    """An installed package has no checkout."""
    here = ["git", "-C", str(Path(__file__).parents[3]), "--git-dir=.git"]
    try:
        done = subprocess.run([*here, *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown" if words[0] == "rev-parse" else ""
    return done.stdout.strip()

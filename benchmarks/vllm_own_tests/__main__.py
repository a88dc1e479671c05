"""Runs vLLM's own tests of sampling, scheduling and speculative decoding three ways: without our plug-in, with
it asleep, and awake.

    python -m benchmarks.vllm_own_tests SOURCES --vllm PYTHON --model FOLDER --drafter FOLDER

SOURCES is the unpacked source distribution, or a checkout, of the vLLM that PYTHON's environment has; this
environment needs tblib and pytest-asyncio, too, which vLLM's tests import. FOLDER, a Llama with a tokenizer
such as SmolLM2, and an EAGLE drafter for it stand for the models that the tests would download (hub.py). No
test is edited. Exit code 1 if a test that passes without the plug-in fails with it and the reason is not
written down (differences.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import carry_out, command_of, make_parser
from benchmarks.real_size.competitors import has_packages
from benchmarks.report import environment, write_report
from benchmarks.vllm_own_tests.files import FILES
from benchmarks.vllm_own_tests.hub import make_hub
from benchmarks.vllm_own_tests.report import WAYS, is_explained, summarize, to_markdown
from tlt.base.types import UserError

ROOT = Path(__file__).parents[2]
NEEDED = ("vllm", "tlt", "pytest", "pytest_timeout", "pytest_asyncio", "tblib")


def main() -> int:
    parser = make_parser("vllm_own_tests", __doc__, "benchmarks/results/vllm-own-tests")
    parser.add_argument("sources", type=Path, help="vLLM's sources, of the installed release")
    parser.add_argument(
        "--vllm", type=Path, required=True, help="interpreter of an environment with vLLM and tlt"
    )
    parser.add_argument("--model", type=Path, required=True, help="a Llama with a tokenizer")
    parser.add_argument("--drafter", type=Path, required=True, help="an EAGLE drafter for it")
    parser.add_argument(
        "--files", nargs="+", default=FILES, help="or FILE::FUNCTION; default: those of files.py"
    )
    parser.add_argument("--seconds", type=float, default=300, help="a file's time")
    parser.add_argument("--parts", type=Path, help="folder that keeps each file's results, to continue from")
    options = parser.parse_args()
    return carry_out("vllm_own_tests", lambda: run(options, command_of(parser)))


def run(options: argparse.Namespace, command: str) -> int:
    check(options)
    with tempfile.TemporaryDirectory(prefix="tlt-vllm-own-tests-") as name:
        folder = Path(name)
        parts = options.parts or folder / "parts"
        shutil.copytree(options.sources / "tests", folder / "tests")
        make_hub(options.model, options.drafter, folder)
        found = {way: results_of(way, options, folder, parts) for way in WAYS}
    report = {
        "command": without_folders(command),
        "environment": {**environment(), "vllm": version_of(options.vllm)},
        "sources": options.sources.name,
        **summarize(found),
    }
    write_report(options.out, report, to_markdown(report))
    print(to_markdown(report))
    return 0 if is_explained(report) else 1


def check(options: argparse.Namespace) -> None:
    if not (options.sources / "tests" / "v1").is_dir():
        raise UserError(
            f"SOURCES: {options.sources} has no tests/v1; give vLLM's unpacked source distribution"
        )
    if not has_packages(options.vllm, *NEEDED):
        raise UserError(
            f"--vllm: {options.vllm} lacks one of {', '.join(NEEDED)}; install them in its environment"
        )
    for file in options.files:
        if not (options.sources / file.partition("::")[0]).is_file():
            raise UserError(f"--files: {file} is not in {options.sources}; name a file such as {FILES[0]}")


def results_of(way: str, options: argparse.Namespace, folder: Path, parts: Path) -> list[dict[str, Any]]:
    """Returns what the files' tests said in this way, from the parts where they are there."""
    kept = parts / f"{way}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    done = {one["file"] for one in read(kept) if "exit" in one}
    if left := [file for file in options.files if file not in done]:
        command = [options.vllm, "-P", "-m", "benchmarks.vllm_own_tests.inside", way, options.seconds, *left]
        with kept.open("a", encoding="utf-8") as out, (parts / f"{way}.log").open("a") as log:
            environ = environment_for(folder, os.environ)
            subprocess.run([*map(str, command)], env=environ, cwd=folder, stdout=out, stderr=log, check=True)
    wanted = set(options.files)
    return [one for one in read(kept) if one["file"] in wanted]


def environment_for(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of vLLM's tests: `tests` is vLLM's package, and the hub is ours."""
    return {
        **given,
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "HF_HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine's process would import vLLM again
        "VLLM_NO_USAGE_STATS": "1",
    }


def read(kept: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []


def version_of(python: Path) -> str:
    code = "import vllm; print(vllm.__version__)"
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def without_folders(command: str) -> str:
    """Returns the command with the last part of each path."""
    words: Sequence[str] = command.split()
    return " ".join(word if word.startswith("tests/") else Path(word).name for word in words)


if __name__ == "__main__":
    sys.exit(main())

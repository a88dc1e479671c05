"""`make gpu-carry`: gathers in .gpu what a GPU machine without a network lacks: packages for PYTHONPATH, and
the commit.

The machine has PyTorch, Triton, transformers, numba and their like in Python 3.12 for x86-64
(docs/gpu.md); the packages below it has not. They come in the versions that are installed here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu.environment import COMMIT_FILE
from benchmarks.report import environment

PACKAGES = ("annotated-types", "pydantic", "pydantic_core", "typing-inspection")
PYTHON_VERSION = "3.12"
PLATFORMS = ("manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_BYTES = 32 * 2**20
"""Half of what a working tree may weigh that travels."""


def pip_command(site: Path) -> list[str]:
    """Returns the command that installs the packages there, whatever runs here."""
    words = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--no-deps",
        "--only-binary=:all:",
    ]
    words += ["--implementation", "cp", "--python-version", PYTHON_VERSION, "--target", str(site)]
    words += [word for platform in PLATFORMS for word in ("--platform", platform)]
    return [*words, *(f"{name}=={version(name)}" for name in PACKAGES)]


def main() -> None:
    site = COMMIT_FILE.parent / "site"
    shutil.rmtree(COMMIT_FILE.parent, ignore_errors=True)
    site.mkdir(parents=True)
    subprocess.run(pip_command(site), check=True)
    COMMIT_FILE.write_text(f"{environment()['commit']}\n")
    size = sum(path.stat().st_size for path in COMMIT_FILE.parent.rglob("*") if path.is_file())
    assert size <= MOST_BYTES, f"{size / 2**20:.0f} MiB are too many to carry"
    print(f"{COMMIT_FILE.parent}: {size / 2**20:.1f} MiB; carry it along (docs/gpu.md)")


if __name__ == "__main__":
    main()

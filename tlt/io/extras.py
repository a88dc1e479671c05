"""How optional packages are installed: the extras of pyproject.toml, which the installed TLT names."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires

DISTRIBUTION = "tlt-rl"


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra, for the end of an error. It names the packages themselves,
    for TLT may be installed from anywhere; where it is not installed, its folder has to be at hand."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        lines = []
    wanted = re.compile(rf"""extra\s*==\s*["']{re.escape(extra)}["']""")
    packages = [line.partition(";")[0].strip() for line in lines if wanted.search(line)]
    if not packages:
        return f"pip install '.[{extra}]' in the folder of TLT's source"
    return f"pip install {shlex.join(packages)}"

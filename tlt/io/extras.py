"""How optional packages are installed, by the extras of pyproject.toml."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra, for the end of an error. TLT is on no package index, so
    it is installed from its source."""
    return f"pip install '.[{extra}]' in the folder of TLT's source"

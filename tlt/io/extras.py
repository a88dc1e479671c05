"""Optional packages, by the extras of pyproject.toml: how they are installed. Imports none."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Returns the command that brings the packages of an extra, for the end of an error. TLT lies on no
    package index, so it is installed from its source."""
    return f"pip install '.[{extra}]' in the folder of TLT's source"

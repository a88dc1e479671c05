"""`tlt init`: a recipe of one's own to change. Does not know what is in it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from tlt.cli.options import Options


class Init(Options):
    """Copy a recipe into a folder: its configurations, its model and its drafter."""

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """Name of a recipe, such as countdown, or of one of its configurations, such as math/chain_sum."""
    folder: Annotated[Positional[Path], arg(metavar="DIR")]
    """Folder to copy it to, new or empty."""


def run(options: Init) -> int:
    """Copies the recipe and prints what lies there and the next command."""
    from tlt.recipes import copy_recipe

    parts = copy_recipe(options.recipe, options.folder)
    config, *_ = parts
    print(f"{options.folder}:")
    for path in parts:
        print(f"  {path.name}{'/' if path.is_dir() else ''}")
    print(f"Next: cd {shlex.quote(str(options.folder))} && tlt train {config.name}")
    return 0

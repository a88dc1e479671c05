"""The recipes that come with TLT: where they lie, and how to copy one. Does not know what a configuration
says.

a wheel            tlt/_recipes/countdown/{quickstart.toml, headline.toml, base/, drafter/}
the repository     recipes/countdown/…  and beside it the scripts that made model and drafter
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

from tlt.types import UserError

CONFIG = "quickstart.toml"
"""The configuration that a recipe's name alone stands for."""

MODEL = "base"
"""The folder of a recipe's own model, in the recipe or in its copy."""

_SHIPPED = Path(__file__).parents[1] / "_recipes"
_REPOSITORY = Path(__file__).parents[2] / "recipes"
_LEFT_OUT = shutil.ignore_patterns("*.py", "__pycache__", "README.md", ".*")
"""The files by which a recipe was made; pyproject.toml leaves them out of the wheel, too."""


def list_recipes() -> list[str]:
    """Returns the names of all recipes that have a quickstart."""
    return sorted(path.parent.name for path in _home().glob(f"*/{CONFIG}"))


def find_recipe(name: str) -> Path:
    """Returns the configuration that `name` stands for: "countdown" for its quickstart.toml,
    "countdown/headline" for its headline.toml. Raises UserError for a name that no recipe has."""
    recipe, _, variant = name.partition("/")
    config = _folder(recipe) / (f"{variant}.toml" if variant else CONFIG)
    if not config.is_file():
        known = ", ".join(sorted(f"{recipe}/{path.stem}" for path in config.parent.glob("*.toml")))
        raise UserError(f"recipe {name!r}: {recipe} has no {config.name}; give one of {known}")
    return config


def resolve_config(path: Path) -> Path:
    """Returns the configuration file that a user means by `path`: the file of that name, else a recipe's
    by its name, which may have dots in it. Raises UserError for what is neither; a missing .toml or .json
    is `load_config`'s to refuse."""
    if os.path.exists(path) or path.suffix in (".toml", ".json"):
        return path
    if path.parts[:1] and path.parts[0] in _folders():
        return find_recipe(path.as_posix())
    raise UserError(f"{path}: is neither a file nor a recipe; recipes are {', '.join(_folders())}")


def copy_recipe(name: str, folder: Path, bring_model: Callable[[Path], None] | None = None) -> list[Path]:
    """Copies a recipe, its model and its drafter into `folder`, which must be new or empty. Returns what lies
    there now, the configuration that the name stands for first.

    bring_model: writes the recipe's model into the folder that it is given, in the copy; the copied
        configurations name that folder in place of the model's name on the hub. None: the model stays what
        the recipe says.

    Raises UserError for an unknown name and for a folder that holds something or cannot be written.
    """
    config = find_recipe(name)
    check_free(folder)
    if bring_model is not None:
        bring_model(folder / MODEL)
    try:
        shutil.copytree(config.parent, folder, ignore=_LEFT_OUT, dirs_exist_ok=True)
        if bring_model is not None:
            for copied in folder.glob("*.toml"):
                copied.write_text(_with_own_model(copied.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, shutil.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"{folder}: the recipe cannot be written there ({reason}); give another folder"
        ) from None
    return sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name != config.name, path.name))


def check_free(folder: Path) -> None:
    """Raises UserError for a folder that a recipe cannot be copied into, for something is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not an empty folder; give a new one")


def _with_own_model(text: str) -> str:
    """Returns a recipe's configuration with its own model in place of the hub's. Its comments stay."""
    named, own = (json.dumps(path) for path in (tomllib.loads(text)["model"]["path"], MODEL))
    assert text.count(named) == 1, f"{named} must stand in the configuration once, as model.path"
    return text.replace(named, own)


def _folder(name: str) -> Path:
    if name not in _folders():
        raise UserError(f"recipe {name!r}: is unknown; recipes are {', '.join(_folders())}")
    return _home() / name


def _folders() -> list[str]:
    return sorted({path.parent.name for path in _home().glob("*/*.toml")})


def _home() -> Path:
    return _SHIPPED if _SHIPPED.is_dir() else _REPOSITORY

"""The recipes that come with TLT: where they lie, and how to copy one. Does not know what a configuration says.

a wheel            tlt/_recipes/countdown/{quickstart.toml, headline.toml, base/, drafter/}
the repository     recipes/countdown/…  and beside it the scripts that made model and drafter
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tlt.types import UserError

CONFIG = "quickstart.toml"
"""The configuration that a recipe's name alone stands for."""

_SHIPPED = Path(__file__).parent / "_recipes"
_REPOSITORY = Path(__file__).parents[1] / "recipes"
_LEFT_OUT = shutil.ignore_patterns("*.py", "__pycache__", "README.md", ".*")
"""The files by which a recipe was made; pyproject.toml leaves them out of the wheel, too."""


def list_recipes() -> list[str]:
    """Returns the names of all recipes."""
    return sorted(path.parent.name for path in _home().glob(f"*/{CONFIG}"))


def find_recipe(name: str) -> Path:
    """Returns the configuration that `name` stands for: "countdown" for its quickstart.toml, "countdown/headline" for its
    headline.toml. Raises UserError for a name that no recipe has."""
    recipe, _, variant = name.partition("/")
    config = _folder(recipe) / (f"{variant}.toml" if variant else CONFIG)
    if not config.is_file():
        known = ", ".join(sorted(f"{recipe}/{path.stem}" for path in config.parent.glob("*.toml")))
        raise UserError(f"recipe {name!r}: {recipe} has no {config.name}; give one of {known}")
    return config


def resolve_config(path: Path) -> Path:
    """Returns the configuration file that a user means by `path`: the file of that name, else a recipe's by its name. Raises
    UserError where a path without a suffix is neither; other files are `load_config`'s to refuse."""
    if path.exists() or path.suffix:
        return path
    if path.parts[:1] and path.parts[0] in list_recipes():
        return find_recipe(path.as_posix())
    raise UserError(f"{path}: is neither a file nor a recipe; recipes are {', '.join(list_recipes())}")


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copies a recipe, its model and its drafter into `folder`, which must be new or empty. Returns what lies there now.

    Raises UserError for an unknown name and for a folder that holds something or cannot be written.
    """
    source = _folder(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not an empty folder; give a new one")
    try:
        shutil.copytree(source, folder, ignore=_LEFT_OUT, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{folder}: the recipe cannot be written there ({reason}); give another folder") from None
    return sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name != CONFIG, path.name))


def _folder(name: str) -> Path:
    if name not in list_recipes():
        raise UserError(f"recipe {name!r}: is unknown; recipes are {', '.join(list_recipes())}")
    return _home() / name


def _home() -> Path:
    return _SHIPPED if _SHIPPED.is_dir() else _REPOSITORY

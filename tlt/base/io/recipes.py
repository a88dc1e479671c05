"""The recipes that come with TLT.

a wheel            tlt/_recipes/countdown/{quickstart.toml, headline.toml, base/, drafter/}
the repository     recipes/countdown/…
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

from tlt.base.types import UserError

CONFIG = "quickstart.toml"

MODEL = "base"

_SHIPPED = Path(__file__).parents[2] / "_recipes"
_REPOSITORY = Path(__file__).parents[3] / "recipes"
_LEFT_OUT = shutil.ignore_patterns(
    "make_*.py", "train_*.py", "search.py", "warm_up.py", "__pycache__", "README.md", ".*"
)
"""Files that made a recipe; pyproject.toml leaves them out of the wheel, too. Other .py files are its
tasks."""


def list_configs() -> list[str]:
    """Names "countdown" (its quickstart.toml) and "countdown/headline"."""
    names = (path.parent.name if path.name == CONFIG else _name(path) for path in _home().glob("*/*.toml"))
    return sorted(names)


def _name(config: Path) -> str:
    return f"{config.parent.name}/{config.stem}"


def find_recipe(name: str) -> Path:
    """Raises UserError for names that `list_configs` lacks."""
    recipe, _, variant = name.partition("/")
    config = _folder(recipe) / (f"{variant}.toml" if variant else CONFIG)
    if not config.is_file():
        known = ", ".join(sorted(map(_name, config.parent.glob("*.toml"))))
        raise UserError(f"recipe {name!r}: {recipe} has no {config.name}; give one of {known}")
    return config


def find_config(path: Path) -> Path:
    """Returns a file, else a recipe. A missing .toml or .json is left to `load_config`; raises UserError for
    other names."""
    if os.path.exists(path) or path.suffix in (".toml", ".json"):
        return path
    if path.parts[:1] and path.parts[0] in _folders():
        return find_recipe(path.as_posix())
    raise UserError(f"{path}: is neither a file nor a recipe; recipes are {', '.join(list_configs())}")


def copy_recipe(name: str, folder: Path, bring_model: Callable[[Path], None] | None = None) -> list[Path]:
    """Copies a recipe into a new or empty folder. Returns the copies, the configuration first.

    bring_model: writes a model into the given folder, which the copied configurations then name; None: they
        keep the recipe's model.

    Raises UserError.
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
    except OSError as error:  # shutil.Error, too
        what = f"the recipe cannot be written there ({error.strerror or error})"
        raise UserError(f"{folder}: {what}; give another folder") from None
    return sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name != config.name, path.name))


def check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not an empty folder; give a new one")


def _with_own_model(text: str) -> str:
    named, own = (json.dumps(path) for path in (tomllib.loads(text)["model"]["path"], MODEL))
    assert text.count(named) == 1, f"{named} must stand in the configuration once, as model.path"
    return text.replace(named, own)


def _folder(name: str) -> Path:
    if name not in _folders():
        raise UserError(f"recipe {name!r}: is unknown; recipes are {', '.join(list_configs())}")
    return _home() / name


def _folders() -> list[str]:
    return sorted({path.parent.name for path in _home().glob("*/*.toml")})


def _home() -> Path:
    return _SHIPPED if _SHIPPED.is_dir() else _REPOSITORY

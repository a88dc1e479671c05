"""A run's policy and drafter as folders to serve.

RUN/policy, RUN/drafter                            of a run that has ended
RUN/checkpoints/step-N ─▶ RUN/served/step-N/…      of one that goes on or was stopped, or of another step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tlt.base.config.schema import Config
from tlt.base.io.text import quoted
from tlt.base.types import UserError
from tlt.drafter.formats.folder import save_stored
from tlt.drafter.vocabulary import from_pairs
from tlt.engine.build.engine import load_stored_drafter
from tlt.engine.build.model import Model, drafter_folder, open_model, open_start
from tlt.models.hf.files import read_json
from tlt.models.hf.peft import AdaptedTensors, Adapter
from tlt.models.hf.weights import content_hash, save_model
from tlt.models.lora import adapter_shapes
from tlt.training.build.policy import master_dtype, saved_dtype
from tlt.training.saved.manifest import Manifest, all_checkpoints, folder_of, read_manifest, verify_files
from tlt.training.saved.run_status import read_status
from tlt.training.saved.shards import CODES, read_into

FOLDER = "served"
_ORIGIN = "tlt_checkpoint"
"""Key of an exported policy's config.json: its checkpoint's digest."""
_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class ServedRun:
    config: Config
    step: int
    policy: Path
    drafter: Path | None


def open_served(folder: Path, step: int | None, log: Callable[[str], None]) -> ServedRun:
    """Opens the final policy, else the newest whole checkpoint's; with `step`, the policy after that many
    updates. Raises UserError if there is none."""
    status, file = read_status(folder), folder / "config.json"
    config = Config.from_json(file.read_text(encoding="utf-8"), str(file))
    if status.state == "finished" and step in (None, status.step) and (folder / "policy").is_dir():
        drafter = folder / "drafter"
        return ServedRun(config, status.step, folder / "policy", drafter if drafter.is_dir() else None)
    path, manifest = _newest(folder, log) if step is None else _of_step(folder, step)
    out = folder / FOLDER / path.name
    if not _is_of(out / "policy", manifest.digest):
        log(f"exporting the policy of {updates(manifest.step)} from {path}")
        _export_policy(path, manifest, config, out / "policy")
    return ServedRun(config, manifest.step, out / "policy", _export_drafter(path, manifest, config, out))


def updates(num: int) -> str:
    return f"{num} update{'s' * (num != 1)}"


def _newest(folder: Path, log: Callable[[str], None]) -> tuple[Path, Manifest]:
    for path in all_checkpoints(folder / "checkpoints"):
        try:
            return path, _verified(path)
        except UserError as error:
            log(f"{str(error).partition(';')[0]}; the one before it is served")
    remedy = f"let it finish a step first, or go on: tlt train --resume {quoted(folder)}"
    raise UserError(f"{folder}: the run has neither ended nor left a whole checkpoint; {remedy}")


def _of_step(folder: Path, step: int) -> tuple[Path, Manifest]:
    path = folder_of(folder / "checkpoints", step)
    if not path.is_dir():
        names = ", ".join(str(int(one.name[5:])) for one in all_checkpoints(folder / "checkpoints"))
        raise UserError(f"--step: is {step}, and {folder} has checkpoints of {names or 'no step'}; give one")
    return path, _verified(path)


def _verified(path: Path) -> Manifest:
    manifest = read_manifest(path)
    verify_files(path, manifest, manifest.files)
    return manifest


def _is_of(policy: Path, digest: str) -> bool:
    return (policy / "config.json").is_file() and read_json(policy / "config.json").get(_ORIGIN) == digest


def _export_policy(path: Path, manifest: Manifest, config: Config, out: Path) -> None:
    dtype, saved = master_dtype(config), SavedTensors(path, manifest, "policy.")
    model = open_start(config, dtype)
    policy: Mapping[str, Tensor] = saved
    if config.lora.is_used:
        adapter = Adapter(
            config.lora, {name: saved[name] for name in adapter_shapes(model.config, config.lora)}
        )
        policy = AdaptedTensors(model.path, model.config, dtype, adapter)
    extra = {_ORIGIN: manifest.digest}
    save_model(out, model.config, policy, dtype=saved_dtype(config), source=model.path, extra=extra)


def _export_drafter(path: Path, manifest: Manifest, config: Config, out: Path) -> Path | None:
    """An untrained drafter is served from its own folder."""
    saved, start = SavedTensors(path, manifest, "drafter."), drafter_folder(config)
    if start is None or not saved:
        return start
    model: Model = open_model(out / "policy")
    stored, counters = load_stored_drafter(start, model), manifest.counters["drafter"]
    assert stored is not None, "it has a folder"
    about = {**stored.about, "policy_hash": content_hash(model.tensors), "policy_step": manifest.step}
    about |= {"drafter_version": counters["version"]}
    about |= {"acceptance": counters["acceptance"]} if counters["acceptance"] is not None else {}
    counts_V = stored.counts_V
    if vocabulary := counters.get("vocabulary"):
        counts_V = from_pairs(vocabulary["counts"], model.config.vocab_size)
    tensors = {**stored.tensors, **saved}
    save_stored(
        out / "drafter", replace(stored, tensors=tensors, about=about, counts_V=counts_V), torch.float32
    )
    return out / "drafter"


class SavedTensors(Mapping[str, Tensor]):
    """A checkpoint's tensors of one prefix, without the prefix in their names, read on access."""

    def __init__(self, path: Path, manifest: Manifest, kind: str) -> None:
        self._path, self._stored, self._kind = path, manifest.tensors, kind

    def __getitem__(self, name: str) -> Tensor:
        key = self._kind + name
        tensor = torch.empty(self._stored[key].shape, dtype=_DTYPES[self._stored[key].code])
        read_into({key: tensor}, self._stored, self._path)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self._kind) for key in self._stored if key.startswith(self._kind))

    def __len__(self) -> int:
        return sum(1 for _ in self)

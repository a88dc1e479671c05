"""`--geometry`: grows a configuration's model and drafter into the sizes of a large model.

    config ─ model/, drafter/ ─ grow ─▶ FOLDER/model, FOLDER/drafter ─▶ config that names these
                    └────────── the same greedy tokens? ──────┘

Times and memory are then those of the large model; tokens and acceptance stay those of the small one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.drafter_growth import grow_drafter, grow_shape
from benchmarks.geometry import OPTION, Geometry, Grown, find_geometry, grow_config
from benchmarks.growth import NOISE, GrownTensors
from benchmarks.report import with_changes
from tlt import __version__
from tlt.base.config.schema import Config
from tlt.base.types import Request, SamplingParams, UserError
from tlt.drafter.formats.folder import StoredDrafter, save_stored
from tlt.drafter.shape import DrafterShape
from tlt.engine.build.engine import build_engine, load_stored_drafter
from tlt.engine.build.model import (
    Model,
    adapter_folder,
    drafter_folder,
    load_model,
    model_folder,
    open_model,
)
from tlt.engine.settings import EngineSettings
from tlt.models.attention import PackedCausal
from tlt.models.hf.config import config_to_hf
from tlt.models.hf.weights import content_hash, expected_shapes, save_model
from tlt.models.packed import PackedTransformer
from tlt.training.build.layout import device_of, engine_dtype
from tlt.training.build.policy import master_dtype
from tlt.training.build.problems import load_problems

NUM_PROMPTS, NUM_TOKENS = 8, 16
"""Prompts, and greedy tokens of each response, that are compared."""

MIN_EQUAL = 0.9
"""Share of the tokens that must be equal. In float32 all are; bfloat16 rounds the grown weights, so near-ties
may fall the other way."""

SHARD_BYTES = 2**30
"""Size of the grown model's files, of which one is in memory at a time."""

HELD_STILL = {"optimizer.learning_rate": 1e-20, "drafter.learning_rate": 1e-20}
"""Learning rates at which an update has its full cost but changes no weight. Larger ones would also train the
noise, and the grown model would no longer behave as the small one."""


Text = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and a response to it, in token ids."""


@dataclass(frozen=True)
class Agreement:
    """The grown model's logits compared with the small one's, along the small model's greedy responses."""

    num_equal: int
    """Tokens, of `num_tokens`, that are also the grown model's first choice."""
    num_tokens: int
    difference: float
    """The largest difference between logits of the same id, over the ids of the small model."""


@dataclass(frozen=True)
class Growth:
    """A small model and the large one that it grows into."""

    geometry: Geometry
    small: Model
    drafter: StoredDrafter | None
    """The small model's drafter; None: there is none."""
    grown: Grown
    drafter_shape: DrafterShape | None
    """Shape of the grown drafter."""

    @property
    def num_parameters(self) -> int:
        return sum(shape.numel() for shape in expected_shapes(self.grown.config).values())

    def folder_name(self, dtype: torch.dtype, device: str) -> str:
        """Returns a name that no other growth has. device: the kind of device that draws the noise."""
        config, model = config_to_hf(self.grown.config, dtype), content_hash(self.small.tensors)
        drafter = None if self.drafter is None else content_hash(self.drafter.tensors)
        origin = json.dumps([__version__, NOISE, device, config, model, drafter])
        return f"{self.geometry.name}-{hashlib.sha256(origin.encode()).hexdigest()[:8]}"


def plan_growth(config: Config, given: str) -> Growth:
    """Reads the configuration's model and drafter and plans their growth into the user's --geometry. Raises
    UserError where they cannot grow into it."""
    geometry = find_geometry(given)
    small = load_model(model_folder(config), master_dtype(config), adapter_folder(config))
    grown, drafter = grow_config(small.config, geometry), load_stored_drafter(drafter_folder(config), small)
    shape = None if drafter is None else grow_shape(drafter.config, small.config, grown.config)
    return Growth(geometry, small, drafter, grown, shape)


def hold_still(overrides: Sequence[str]) -> tuple[str, ...]:
    """Returns the overrides of a run that trains a grown model: learning rates of almost 0 unless the user
    gives others."""
    given = {word.split("=")[0] for word in overrides}
    return (*(f"--{key}={value}" for key, value in HELD_STILL.items() if f"--{key}" not in given), *overrides)


@contextlib.contextmanager
def grown_config(
    config: Config, growth: Growth | None, keep: Path | None = None
) -> Iterator[tuple[Config, dict[str, Any]]]:
    """Yields the configuration with the grown model and drafter, and the entries of a report.

    growth: None: nothing grows.
    keep: the folder in which they stay and are found again; None: a temporary one.
    Raises UserError where the disk has no room, or the grown model does not generate the small one's tokens.
    """
    if growth is None:
        yield config, {}
    elif keep is not None:
        yield _grow_into(keep, config, growth)
    else:
        with tempfile.TemporaryDirectory(prefix="tlt-geometry-") as folder:
            yield _grow_into(Path(folder), config, growth)


def _grow_into(parent: Path, config: Config, growth: Growth) -> tuple[Config, dict[str, Any]]:
    dtype, device = engine_dtype(config), device_of(config).name
    folder = parent / growth.folder_name(dtype, device)
    if not (folder / "model").exists():  # written last, and whole
        check_disk(parent, growth.geometry, growth.num_parameters * dtype.itemsize)
        write_grown(folder, growth, dtype, torch.device(device))
    drafter = None if growth.drafter is None else folder / "drafter"
    model = {"path": folder / "model", "adapter": None}
    changed = with_changes(config, {"model": model, "drafter": {"path": drafter}})
    agreement = compare(growth.small, open_model(folder / "model"), changed)
    if agreement.num_equal < MIN_EQUAL * agreement.num_tokens:
        found = f"only {agreement.num_equal} of {agreement.num_tokens} greedy tokens are the small model's"
        where = f"{OPTION}: {growth.geometry.name}"
        raise UserError(f"{where}: {found} in {_name_of(dtype)}; set run.dtype to float32")
    return changed, {"geometry": describe_growth(growth, agreement, config)}


def write_grown(folder: Path, growth: Growth, dtype: torch.dtype, device: torch.device) -> None:
    """Writes the grown drafter and model into `folder`, the model tensor by tensor. device: of the noise."""
    small, grown = growth.small, growth.grown.config
    if growth.drafter is not None:
        drafter = grow_drafter(growth.drafter, small.config, small.tensors, grown, dtype)
        save_stored(folder / "drafter", drafter, dtype)
    tensors = GrownTensors(small.config, small.tensors, grown, dtype, device=device)
    save_model(folder / "model", grown, tensors, dtype=dtype, source=small.path, max_shard_bytes=SHARD_BYTES)


def check_disk(folder: Path, geometry: Geometry, num_bytes: int) -> None:
    """Raises UserError where the disk of a folder has no room. The folder need not exist yet."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if (free := shutil.disk_usage(place).free) < num_bytes:
        sizes = f"takes {num_bytes / 1e9:.1f} GB of disk in {place}, where {free / 1e9:.1f} GB are free"
        remedy = "set run.out_dir or TMPDIR to a larger disk, or run.dtype to bfloat16"
        raise UserError(f"{OPTION}: {geometry.name} {sizes}; {remedy}")


# ── the same function? ──────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def compare(small: Model, grown: Model, config: Config) -> Agreement:
    """Compares both models along the small one's greedy responses to the configuration's first prompts. If
    the grown model chooses each of these tokens, it generates the same responses."""
    dtype, device = engine_dtype(config), torch.device(device_of(config).name)
    prompts = [problem.prompt_ids for problem in load_problems(config, "train")[:NUM_PROMPTS]]
    texts = greedy_responses(small, prompts)
    expected_NV = response_logits(small, texts, master_dtype(config), torch.device("cpu"))
    found_NV = response_logits(grown, texts, dtype, device)
    num_equal = int((expected_NV.argmax(-1) == found_NV.argmax(-1)).sum())
    difference = (found_NV[:, : small.config.vocab_size] - expected_NV).abs().max()
    return Agreement(num_equal, len(expected_NV), float(difference))


def greedy_responses(model: Model, prompts: Sequence[tuple[int, ...]]) -> list[Text]:
    """Returns (prompt, response), in the order of the prompts."""
    dtype = next(iter(model.tensors.values())).dtype
    settings = EngineSettings(dtype=dtype, max_batch_size=len(prompts))
    engine = build_engine(model.config, model.tensors, settings)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop_ids=model.stop_ids)
    requests = [Request(str(index), 0, prompt, params) for index, prompt in enumerate(prompts)]
    rollouts = sorted(engine.generate(requests), key=lambda rollout: int(rollout.problem_id))
    return [(rollout.prompt_ids, rollout.token_ids) for rollout in rollouts]


def response_logits(model: Model, texts: Sequence[Text], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the model's float64 logits [N, V] for each token of the responses, given those before it."""
    packed = PackedTransformer(model.config, dtype, device)
    packed.load(model.tensors, version=0)
    read = [(*prompt, *response[:-1]) for prompt, response in texts]
    attend = PackedCausal(model.config, [len(tokens) for tokens in read])
    token_ids = torch.tensor([token for tokens in read for token in tokens], device=device)
    features_NE = packed.forward(token_ids, attend.positions(device), attend)
    is_drawn = [i >= len(prompt) - 1 for prompt, text in texts for i in range(len(prompt) + len(text) - 1)]
    return packed.logits(features_NE[torch.tensor(is_drawn, device=device)]).double().cpu()


# ── the report's entry ──────────────────────────────────────────────────────────────────────────────────────


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe_growth(growth: Growth, agreement: Agreement, config: Config) -> dict[str, Any]:
    """Returns the entry of a report; its `lines` are for readers."""
    c, small, name = growth.grown.config, growth.small, growth.geometry.name
    heads = f"{c.num_heads} heads, {c.num_kv_heads} of keys and values"
    tokens = f"{agreement.num_equal} of {agreement.num_tokens} greedy tokens"
    equal = f"{tokens} equal, logits within {agreement.difference:.1g}"
    number = f"{growth.num_parameters:,} parameters in {_name_of(engine_dtype(config))}"
    lines = [
        f"geometry {name}: {number}, grown from {small.path.name}",
        f"shape: {c.architecture}, {c.num_layers} layers, hidden size {c.hidden_size:,}, {heads}",
        *(f"differs from {name}: {note}" for note in growth.grown.notes),
        f"behaviour: the small model's, its tokens and its acceptance; {equal}",
        f"vocabulary: {c.vocab_size:,} ids, of which {small.config.vocab_size:,} are ever drawn",
    ]
    rates = {"policy": config.optimizer.learning_rate, "drafter": config.drafter.learning_rate}
    if still := " and ".join(name for name, rate in rates.items() if rate in HELD_STILL.values()):
        lines.append(
            f"training: {still} with a learning rate of almost 0, so every step is of the same model"
        )
    return {"name": name, "num_parameters": growth.num_parameters, **vars(agreement), "lines": lines}

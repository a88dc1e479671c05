"""`--geometry`: a configuration whose model and drafter have grown into the sizes of a large one. What is
measured costs what it costs there; tokens and acceptance stay those of the small model.

    config ─ model/, drafter/ ─ grow ─▶ FOLDER/model, FOLDER/drafter ─▶ config that names these
                    └────────── the same greedy tokens? ──────┘
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

from tlt import __version__
from tlt.assembly.engine import EngineSettings, build_engine, load_stored_drafter
from tlt.assembly.model import Model, adapter_folder, drafter_folder, load_model, model_folder, open_model
from tlt.assembly.policy import master_dtype
from tlt.assembly.world import device_of
from tlt.bench.report import with_changes
from tlt.config.schema import Config
from tlt.drafter.formats.folder import StoredDrafter, save_stored
from tlt.drafter.growth import grow_drafter, grow_shape
from tlt.drafter.model import DrafterShape
from tlt.hf.config import config_to_hf
from tlt.hf.geometry import OPTION, Geometry, Grown, find_geometry, grow_config
from tlt.hf.growth import NOISE, GrownTensors
from tlt.hf.weights import content_hash, expected_shapes, save_model
from tlt.models.attention import PackedCausal
from tlt.models.packed import PackedTransformer
from tlt.training.problems import load_problems
from tlt.types import Request, SamplingParams, UserError, resolve_dtype

NUM_PROMPTS, NUM_TOKENS = 8, 16
"""Greedy tokens that are compared: so many of a response to each of so many prompts."""

MIN_EQUAL = 0.9
"""Share of them that has to be equal. All are in float32; bfloat16 rounds the grown weights, and near-ties
fall otherwise."""

SHARD_BYTES = 2**30
"""Of the grown model's files; one of them is in memory at a time."""

HELD_STILL = {"optimizer.learning_rate": 1e-20, "drafter.learning_rate": 1e-20}
"""With which an update costs what it costs and changes no weight. A larger one would train the noise, too,
and after a step the grown model would be nobody's."""


Text = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and a response to it, in token ids."""


@dataclass(frozen=True)
class Agreement:
    """How the grown model's logits compare with the small one's, where that one's greedy responses go.

    num_equal: of num_tokens, those that are the grown model's first choice, too.
    difference: the largest between logits of the same id, over the ids of the small model.
    """

    num_equal: int
    num_tokens: int
    difference: float


@dataclass(frozen=True)
class Growth:
    """What is to grow into what. drafter: the small model's, None: there is none.  drafter_shape: that of the
    grown one."""

    geometry: Geometry
    small: Model
    drafter: StoredDrafter | None
    grown: Grown
    drafter_shape: DrafterShape | None

    @property
    def num_parameters(self) -> int:
        return sum(shape.numel() for shape in expected_shapes(self.grown.config).values())

    def folder_name(self, dtype: torch.dtype, device: str) -> str:
        """Returns a name that no other growth has. device: the kind that draws the noise."""
        origin = [
            __version__,
            NOISE,
            device,
            config_to_hf(self.grown.config, dtype),
            content_hash(self.small.tensors),
        ]
        origin.append(None if self.drafter is None else content_hash(self.drafter.tensors))
        return f"{self.geometry.name}-{hashlib.sha256(json.dumps(origin).encode()).hexdigest()[:8]}"


def plan_growth(config: Config, given: str) -> Growth:
    """Reads the configuration's model and drafter, which are to grow into the user's --geometry. Raises
    UserError where they do not."""
    geometry = find_geometry(given)
    small = load_model(model_folder(config), master_dtype(config), adapter_folder(config))
    grown, drafter = grow_config(small.config, geometry), load_stored_drafter(drafter_folder(config), small)
    shape = None if drafter is None else grow_shape(drafter.config, grown.config)
    return Growth(geometry, small, drafter, grown, shape)


def hold_still(overrides: Sequence[str]) -> tuple[str, ...]:
    """Returns the overrides of a run that trains a grown model: learning rates are almost 0 unless the user
    gives them."""
    given = {word.split("=")[0] for word in overrides}
    return (*(f"--{key}={value}" for key, value in HELD_STILL.items() if f"--{key}" not in given), *overrides)


@contextlib.contextmanager
def grown_config(
    config: Config, growth: Growth | None, keep: Path | None = None
) -> Iterator[tuple[Config, dict[str, Any]]]:
    """Yields the configuration with model and drafter grown, and what a report holds of them. growth: None:
    neither grows.

    keep: the folder in which they stay, and are found again; None: a temporary one.
    Raises UserError where the disk has no room, or the grown model does not generate as the small one.
    """
    if growth is None:
        yield config, {}
    elif keep is not None:
        yield _grow_into(keep, config, growth)
    else:
        with tempfile.TemporaryDirectory(prefix="tlt-geometry-") as folder:
            yield _grow_into(Path(folder), config, growth)


def _grow_into(parent: Path, config: Config, growth: Growth) -> tuple[Config, dict[str, Any]]:
    dtype, device = resolve_dtype(config.run.dtype), device_of(config).name
    folder = parent / growth.folder_name(dtype, device)
    if not (folder / "model").exists():  # written last, and whole
        check_disk(parent, growth.geometry, growth.num_parameters * dtype.itemsize)
        write_grown(folder, growth, dtype, torch.device(device))
    drafter = None if growth.drafter is None else folder / "drafter"
    model = {"path": folder / "model", "revision": None, "adapter": None}
    changed = with_changes(config, {"model": model, "drafter": {"path": drafter}})
    agreement = compare(growth.small, open_model(folder / "model"), changed)
    if agreement.num_equal < MIN_EQUAL * agreement.num_tokens:
        found = f"only {agreement.num_equal} of {agreement.num_tokens} greedy tokens are the small model's in {config.run.dtype}"
        raise UserError(f"{OPTION}: {growth.geometry.name}: {found}; set run.dtype to float32")
    return changed, {"geometry": describe(growth, agreement, config)}


def write_grown(folder: Path, growth: Growth, dtype: torch.dtype, device: torch.device) -> None:
    """Writes the grown drafter and model into `folder`, the model tensor by tensor. device: of the noise."""
    small, grown = growth.small, growth.grown.config
    if growth.drafter is not None:
        save_stored(folder / "drafter", grow_drafter(growth.drafter, grown, dtype), dtype)
    tensors = GrownTensors(small.config, small.tensors, grown, dtype, device=device)
    save_model(folder / "model", grown, tensors, dtype=dtype, source=small.path, max_shard_bytes=SHARD_BYTES)


def check_disk(folder: Path, geometry: Geometry, num_bytes: int) -> None:
    """Raises UserError where the disk of a folder, which need not exist yet, has no room."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if (free := shutil.disk_usage(place).free) < num_bytes:
        sizes = f"takes {num_bytes / 1e9:.1f} GB of disk in {place}, where {free / 1e9:.1f} GB are free"
        remedy = (
            "set run.out_dir or, for tlt bench rollout, TMPDIR to a larger disk, or run.dtype to bfloat16"
        )
        raise UserError(f"{OPTION}: {geometry.name} {sizes}; {remedy}")


# ── the same function? ──────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def compare(small: Model, grown: Model, config: Config) -> Agreement:
    """Compares the two along greedy responses of the small model to the configuration's first prompts. Where
    the grown model would choose every one of these tokens, it generates the same."""
    dtype, device = resolve_dtype(config.run.dtype), torch.device(device_of(config).name)
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
    engine = build_engine(
        model.config, model.tensors, EngineSettings(dtype=dtype, max_batch_size=len(prompts))
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop_ids=model.stop_ids)
    requests = [Request(str(index), 0, prompt, params) for index, prompt in enumerate(prompts)]
    rollouts = sorted(engine.generate(requests), key=lambda rollout: int(rollout.problem_id))
    return [(rollout.prompt_ids, rollout.token_ids) for rollout in rollouts]


def response_logits(model: Model, texts: Sequence[Text], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns float64 logits [N, V] from which the model draws each token of the responses, given those
    before it."""
    packed = PackedTransformer(model.config, dtype, device)
    packed.load(model.tensors, version=0)
    read = [(*prompt, *response[:-1]) for prompt, response in texts]
    attend = PackedCausal(model.config, [len(tokens) for tokens in read])
    token_ids = torch.tensor([token for tokens in read for token in tokens], device=device)
    features_NE = packed.forward(token_ids, attend.positions(device), attend)
    drawn = [
        index >= len(prompt) - 1
        for prompt, response in texts
        for index in range(len(prompt) + len(response) - 1)
    ]
    return packed.logits(features_NE[torch.tensor(drawn, device=device)]).double().cpu()


# ── what is said of it ──────────────────────────────────────────────────────────────────────────────────────


def describe(growth: Growth, agreement: Agreement, config: Config) -> dict[str, Any]:
    """Returns the entry of a report; its `lines` are for people."""
    c, small = growth.grown.config, growth.small
    shape = f"{c.num_layers} layers, hidden size {c.hidden_size:,}, {c.num_heads} heads, {c.num_kv_heads} of keys and values"
    number = f"{growth.num_parameters:,} parameters in {config.run.dtype}"
    lines = [
        f"geometry {growth.geometry.name}: {number}, grown from {small.path.name}",
        f"shape: {c.architecture}, {shape}",
        *(f"differs from {growth.geometry.name}: {note}" for note in growth.grown.notes),
        f"behaviour: the small model's, its tokens and its acceptance; {agreement.num_equal} of "
        f"{agreement.num_tokens} greedy"
        f" tokens equal, logits within {agreement.difference:.1g}",
        f"vocabulary: {c.vocab_size:,} ids, of which {small.config.vocab_size:,} are ever drawn",
    ]
    rates = {"policy": config.optimizer.learning_rate, "drafter": config.drafter.learning_rate}
    if still := [name for name, rate in rates.items() if rate in HELD_STILL.values()]:
        lines.append(
            f"training: {' and '.join(still)} with a learning rate of almost 0, so every step is of the "
            "same model"
        )
    return {
        "name": growth.geometry.name,
        "num_parameters": growth.num_parameters,
        **vars(agreement),
        "lines": lines,
    }

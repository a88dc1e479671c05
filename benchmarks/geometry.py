"""Geometries, the sizes of well-known models, and the config of a small model grown to one.

    from the small model    family (see `grow_config`), rotary frequencies with their scaling, window
    from the geometry       hidden size, layers, heads, head size, MLP, vocabulary, whether the head is tied

Other rotary frequencies would be another function at the same cost, so the geometry's are not used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tlt.base.types import UserError
from tlt.models.decoder import Architecture, ModelConfig
from tlt.models.hf.config import parse_config
from tlt.models.hf.files import read_json

OPTION = "--geometry"

_FAMILIES = {"llama": "llama", "qwen2": "qwen2 (biases)", "qwen3": "qwen3 (norms of queries and keys)"}


GEOMETRIES = {
    "qwen2.5-0.5b": ModelConfig("qwen2", 151_936, 896, 4864, 24, 14, 2, 64, tie_embeddings=True),
    "qwen2.5-1.5b": ModelConfig("qwen2", 151_936, 1536, 8960, 28, 12, 2, 128, tie_embeddings=True),
    "qwen2.5-7b": ModelConfig("qwen2", 152_064, 3584, 18_944, 28, 28, 4, 128),
    "llama-3.2-1b": ModelConfig("llama", 128_256, 2048, 8192, 16, 32, 8, 64, tie_embeddings=True),
    "qwen3-8b": ModelConfig("qwen3", 151_936, 4096, 12_288, 36, 32, 8, 128),
}
"""Family, vocabulary, hidden size, MLP, layers, query heads, kv heads and head size of the models' own
config.json files."""

ROUND_WIDTH = 64
"""Kernels are fast where a width is a multiple of this."""


@dataclass(frozen=True)
class Geometry:
    """Sizes to grow into, with a name for messages."""

    name: str
    sizes: ModelConfig


@dataclass(frozen=True)
class Grown:
    """The decoder with a geometry's sizes that can compute the small model's function.

    notes: differences from the geometry, one line each.
    """

    config: ModelConfig
    notes: tuple[str, ...]


def find_geometry(given: str) -> Geometry:
    """Returns the geometry of this name or config.json. Raises UserError for anything else, OtherComputation
    for a family that our decoder does not compute."""
    if (known := GEOMETRIES.get(given.lower())) is not None:
        return Geometry(given.lower(), known)
    path = Path(given)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UserError(
            f"{OPTION}: {given!r} is unknown; give {', '.join(GEOMETRIES)}, or the path of a config.json"
        )
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return Geometry(name, parse_config(read_json(path), str(path)))


def grow_config(small: ModelConfig, geometry: Geometry) -> Grown:
    """Returns the decoder that computes the small model's function in the sizes of the geometry. Raises
    UserError where the small model does not fit.

    Three differences from the geometry can be necessary, and are noted. Weights cannot undo what sets a
    family apart: Qwen3's norms of queries and keys, or Qwen2's biases where the small model uses them. A tied
    head cannot compute an untied one. And there cannot be fewer layers than the small model's: then the MLP
    is narrower, so that a token reads as many weights.
    """
    wanted, notes = geometry.sizes, []
    check_geometry(small, geometry)
    # Qwen2 computes the same as Llama when its biases are zero
    pair = (small.architecture, wanted.architecture)
    architecture: Architecture = "qwen2" if pair == ("llama", "qwen2") else small.architecture
    if architecture != wanted.architecture:
        families = f"{_FAMILIES[architecture]} in place of {_FAMILIES[wanted.architecture]}"
        notes.append(f"{families}: only so is it the small model's function")
    is_tied = small.tie_embeddings and wanted.tie_embeddings
    if wanted.tie_embeddings and not is_tied:
        notes.append("a head of its own in place of a tied one, because the small model has one")
    num_layers, width = max(small.num_layers, wanted.num_layers), wanted.intermediate_size
    if num_layers > wanted.num_layers:
        width = max(_narrowed(wanted, num_layers), small.intermediate_size)
        shapes = f"{num_layers} layers with MLPs of {width:,} in place of {wanted.num_layers} with"
        notes.append(f"{shapes} {wanted.intermediate_size:,}, because the small model has as many")
    config = replace(
        wanted,
        architecture=architecture,
        intermediate_size=width,
        num_layers=num_layers,
        rms_norm_eps=small.rms_norm_eps * small.hidden_size / wanted.hidden_size,
        rope_theta=small.rope_theta,
        rope_scaling=small.rope_scaling,
        max_positions=small.max_positions,
        tie_embeddings=is_tied,
    )
    return Grown(config, tuple(notes))


def check_geometry(small: ModelConfig, geometry: Geometry, whose: str = "the small model") -> None:
    """Raises UserError unless every size of the small model fits into the geometry. whose: the small sizes,
    for messages."""
    wanted = geometry.sizes
    sizes = {
        "hidden_size": (wanted.hidden_size, small.hidden_size + 1),  # one more for the constant (growth.py)
        "intermediate_size": (wanted.intermediate_size, small.intermediate_size),
        "vocab_size": (wanted.vocab_size, small.vocab_size),
        "num_key_value_heads": (wanted.num_kv_heads, len(kv_sources(small, wanted))),
    }
    for name, (given, least) in sizes.items():
        if given < least:
            has = f"{geometry.name} has {name} {given}, but {whose} takes {least}"
            raise UserError(f"{OPTION}: {has}; give a larger one")
    if wanted.head_dim % small.head_dim:
        raise UserError(
            f"{OPTION}: {geometry.name}: heads of {wanted.head_dim} do not repeat the rotary frequencies of "
            f"{whose}'s {small.head_dim}; give one whose head_dim is a multiple of it"
        )


def kv_sources(small: ModelConfig, wanted: ModelConfig) -> list[int]:
    """Returns the small kv head that each of the first kv heads of the grown model copies. Each is copied
    until all its queries have a place."""
    copies = -(-(small.num_heads // small.num_kv_heads) // (wanted.num_heads // wanted.num_kv_heads))
    return [head for head in range(small.num_kv_heads) for _ in range(copies)]


def query_places(small: ModelConfig, wanted: ModelConfig) -> list[int]:
    """Returns the grown query head of each small one, in a group whose kv head is a copy of its own."""
    group, room = small.num_heads // small.num_kv_heads, wanted.num_heads // wanted.num_kv_heads
    copies = -(-group // room)
    places = []
    for head in range(small.num_heads):
        kv_head, member = divmod(head, group)
        places.append((kv_head * copies + member // room) * room + member % room)
    return places


def _narrowed(wanted: ModelConfig, num_layers: int) -> int:
    """Returns the MLP width with which `num_layers` layers have as many weights as the geometry's."""
    attention = wanted.hidden_size * wanted.head_dim * (wanted.num_qkv + wanted.num_heads)
    mlp = 3 * wanted.hidden_size
    layer = (attention + mlp * wanted.intermediate_size) * wanted.num_layers // num_layers
    width = (layer - attention) // mlp
    return max(width - width % ROUND_WIDTH, 1)

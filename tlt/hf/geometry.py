"""The sizes of well-known models, by name, and the decoder that a small model grows into to have them. Knows
no tensors.

A small model's function decides what the grown decoder computes, the geometry decides how large it is:

    taken from the small model    family (see `grow_config`), rotary frequencies with their scaling, window
    taken from the geometry       hidden size, layers, heads, head size, MLP, vocabulary, whether the head is tied

The rotary base and scaling of the geometry are left out: other frequencies are another function, and they
cost the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tlt.hf.config import parse_config
from tlt.hf.files import read_json
from tlt.models.decoder import Architecture, ModelConfig
from tlt.types import UserError

OPTION = "--geometry"


def _sizes(
    architecture: Architecture, vocab: int, hidden: int, mlp: int, layers: int, heads: tuple[int, int, int]
) -> ModelConfig:
    """Returns the sizes of a model with an untied head. heads: of queries, of keys and values, and the
    size of each."""
    return ModelConfig(architecture, vocab, hidden, mlp, layers, *heads)


GEOMETRIES = {
    "qwen2.5-0.5b": replace(_sizes("qwen2", 151_936, 896, 4864, 24, (14, 2, 64)), tie_embeddings=True),
    "qwen2.5-1.5b": replace(_sizes("qwen2", 151_936, 1536, 8960, 28, (12, 2, 128)), tie_embeddings=True),
    "qwen2.5-7b": _sizes("qwen2", 152_064, 3584, 18_944, 28, (28, 4, 128)),
    "llama-3.2-1b": replace(_sizes("llama", 128_256, 2048, 8192, 16, (32, 8, 64)), tie_embeddings=True),
    "qwen3-8b": _sizes("qwen3", 151_936, 4096, 12_288, 36, (32, 8, 128)),
}
"""As the models' own config.json files have them, but for what is left out above."""

ROUND_WIDTH = 64
"""Kernels are fast where a width is a multiple of this."""


@dataclass(frozen=True)
class Geometry:
    """The sizes to grow into. name: for people."""

    name: str
    sizes: ModelConfig


@dataclass(frozen=True)
class Grown:
    """The decoder that has a geometry's sizes and can compute the small model's function.

    notes: in what it differs from the geometry, one line each; none where it does not.
    """

    config: ModelConfig
    notes: tuple[str, ...]


def find_geometry(given: str) -> Geometry:
    """Returns the geometry of this name or config.json. Raises UserError for others, and OtherComputation
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
    UserError where the small model has no room in them.

    Three things give way to the function, and are noted. A family differs by what no weights undo: Qwen3's
    norms of queries and keys, Qwen2's biases where the small model uses them. A tied head cannot stand for
    an untied one. Layers that follow each other cannot be fewer: then the MLP gets narrower, so that a
    token still reads as many weights.
    """
    wanted, notes = geometry.sizes, []
    check_room(small, geometry)
    architecture = _architecture(small, wanted)
    if architecture != wanted.architecture:
        notes.append(
            f"{_named(architecture)} in place of {_named(wanted.architecture)}: only so is it the small "
            "model's function"
        )
    is_tied = small.tie_embeddings and wanted.tie_embeddings
    if wanted.tie_embeddings and not is_tied:
        notes.append("a head of its own in place of a tied one, because the small model has one")
    num_layers, width = max(small.num_layers, wanted.num_layers), wanted.intermediate_size
    if num_layers > wanted.num_layers:
        width = max(_narrowed(wanted, num_layers), small.intermediate_size)
        shape = f"{num_layers} layers with MLPs of {width:,}"
        notes.append(
            f"{shape} in place of {wanted.num_layers} with {wanted.intermediate_size:,}, because the small "
            "model has as many"
        )
    config = replace(
        small,
        architecture=architecture,
        vocab_size=wanted.vocab_size,
        hidden_size=wanted.hidden_size,
        intermediate_size=width,
        num_layers=num_layers,
        num_heads=wanted.num_heads,
        num_kv_heads=wanted.num_kv_heads,
        head_dim=wanted.head_dim,
        rms_norm_eps=small.rms_norm_eps * small.hidden_size / wanted.hidden_size,
        tie_embeddings=is_tied,
    )
    return Grown(config, tuple(notes))


def check_room(small: ModelConfig, geometry: Geometry) -> None:
    """Raises UserError unless every size of the small model fits into the geometry."""
    wanted = geometry.sizes
    sizes = {
        "hidden_size": (wanted.hidden_size, small.hidden_size + 1),  # one more holds the constant (growth.py)
        "intermediate_size": (wanted.intermediate_size, small.intermediate_size),
        "vocab_size": (wanted.vocab_size, small.vocab_size),
        "num_key_value_heads": (wanted.num_kv_heads, len(kv_sources(small, wanted))),
    }
    for name, (given, least) in sizes.items():
        if given < least:
            raise UserError(
                f"{OPTION}: {geometry.name} has {name} {given}, but the small model takes {least}; give a "
                "larger one"
            )
    if wanted.head_dim % small.head_dim:
        sizes_of_heads = f"heads of {wanted.head_dim} do not repeat the rotary frequencies of the small model's {small.head_dim}"
        raise UserError(
            f"{OPTION}: {geometry.name}: {sizes_of_heads}; give one whose head_dim is a multiple of it"
        )


def kv_sources(small: ModelConfig, wanted: ModelConfig) -> list[int]:
    """Returns for each of the first kv heads of the grown model which of the small one's it copies: each
    as often as it takes until all queries that read it have a place."""
    copies = -(-(small.num_heads // small.num_kv_heads) // (wanted.num_heads // wanted.num_kv_heads))
    return [head for head in range(small.num_kv_heads) for _ in range(copies)]


def query_places(small: ModelConfig, wanted: ModelConfig) -> list[int]:
    """Returns the head of the grown model that stands for each query head of the small one: in a group
    whose kv head is a copy of the one that it reads."""
    group, room = small.num_heads // small.num_kv_heads, wanted.num_heads // wanted.num_kv_heads
    copies = -(-group // room)
    places = []
    for head in range(small.num_heads):
        kv_head, member = divmod(head, group)
        places.append((kv_head * copies + member // room) * room + member % room)
    return places


def _architecture(small: ModelConfig, wanted: ModelConfig) -> Architecture:
    """Returns the family of the grown model: Qwen2 computes what Llama does when its biases are zero."""
    return "qwen2" if (small.architecture, wanted.architecture) == ("llama", "qwen2") else small.architecture


def _named(architecture: Architecture) -> str:
    """Returns the family with what sets it apart."""
    return {"llama": "llama", "qwen2": "qwen2 (biases)", "qwen3": "qwen3 (norms of queries and keys)"}[
        architecture
    ]


def _narrowed(wanted: ModelConfig, num_layers: int) -> int:
    """Returns the width of an MLP with which so many layers have as many weights as the geometry's."""
    attention = wanted.hidden_size * wanted.head_dim * (wanted.num_qkv + wanted.num_heads)
    mlp = 3 * wanted.hidden_size
    width = (
        (attention + mlp * wanted.intermediate_size) * wanted.num_layers // num_layers - attention
    ) // mlp
    return max(width - width % ROUND_WIDTH, 1)

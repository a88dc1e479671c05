"""A small model grown into a large geometry computes the same function. Referee: transformers.

All weights are random, norms and biases included, and the eps of the norms is large enough to matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tlt.hf.config import OtherComputation, config_to_hf
from tlt.hf.files import write_hf_json
from tlt.hf.geometry import GEOMETRIES, Geometry, find_geometry, grow_config
from tlt.hf.growth import NOISE, GrownTensors
from tlt.hf.weights import expected_shapes, save_model
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig, RopeScaling, Transformer
from tlt.types import UserError

VOCAB = 29
SMALL = ModelConfig(
    "llama", VOCAB, 32, 48, 2, 4, 2, 8, rms_norm_eps=3e-3, max_positions=64, tie_embeddings=True
)
LARGE = ModelConfig(
    "llama", 97, 96, 112, 3, 12, 4, 16, rms_norm_eps=1e-6, rope_theta=77.0, tie_embeddings=True
)
SCALING = RopeScaling(8.0, 1.0, 4.0, 16)


def like(config: ModelConfig, **changes: Any) -> ModelConfig:
    return dataclasses.replace(config, **changes)


CASES = {
    "llama": (SMALL, LARGE),
    "llama, scaled positions": (like(SMALL, rope_scaling=SCALING, rope_theta=500.0), LARGE),
    "llama, the geometry's positions scaled": (SMALL, like(LARGE, rope_scaling=SCALING)),
    "llama into an untied head": (SMALL, like(LARGE, tie_embeddings=False)),
    "llama, untied, into a tied head": (like(SMALL, tie_embeddings=False), LARGE),
    "llama into more kv heads than it has queries": (
        like(SMALL, num_kv_heads=1),
        like(LARGE, num_heads=6, num_kv_heads=6),
    ),
    "llama, heads of one size": (like(SMALL, head_dim=16), LARGE),
    "llama into fewer layers": (like(SMALL, num_layers=4), like(LARGE, intermediate_size=512)),
    "llama into qwen2": (SMALL, like(LARGE, architecture="qwen2")),
    "llama into qwen3": (SMALL, like(LARGE, architecture="qwen3")),
    "qwen2": (
        like(SMALL, architecture="qwen2"),
        like(LARGE, architecture="qwen2", num_heads=14, num_kv_heads=2),
    ),
    "qwen2 into llama": (like(SMALL, architecture="qwen2"), LARGE),
    "qwen3": (like(SMALL, architecture="qwen3"), like(LARGE, architecture="qwen3")),
    "qwen3 into qwen2, untied": (
        like(SMALL, architecture="qwen3", tie_embeddings=False),
        like(LARGE, architecture="qwen2"),
    ),
}
SEQUENCE = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(3))


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = (
            1 + 0.4 * noise if "norm" in name else 0.5 * noise if name.endswith("bias") else 0.25 * noise
        )
    return tensors


def logits_of(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the logits along SEQUENCE, by the trainable model."""
    model = Transformer(config).double()
    model.load_state_dict(dict(tensors))
    attend = PackedCausal(config, [len(SEQUENCE)])
    with torch.no_grad():
        return model.logits(model(SEQUENCE, attend.positions(), attend))


def grown_case(
    case: str, noise: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ModelConfig, GrownTensors]:
    """Returns the small model's logits, and the grown model."""
    small, large = CASES[case]
    tensors = random_tensors(small)
    config = grow_config(small, Geometry("large", large)).config
    return logits_of(small, tensors), config, GrownTensors(small, tensors, config, dtype, noise)


@pytest.mark.parametrize("case", CASES)
def test_with_noise_the_greedy_tokens_are_the_small_models_and_no_matrix_holds_zeros(case: str) -> None:
    expected, config, tensors = grown_case(case, NOISE)
    found = logits_of(config, tensors)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert 0 < (found[:, :VOCAB] - expected).abs().max() < 1e-5
    for name, tensor in tensors.items():
        if tensor.dim() == 2:  # the row that keeps the constant is the only one
            assert (tensor == 0).sum() <= tensor.shape[
                1 if "embed" not in name and "head" not in name else 0
            ], name


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_the_grown_folder_and_computes_the_same(case: str, tmp_path: Path) -> None:
    expected, config, tensors = grown_case(case, NOISE, torch.float32)
    save_model(tmp_path / "grown", config, tensors, dtype=torch.float32, source=None, max_shard_bytes=20_000)
    assert len(list((tmp_path / "grown").glob("*.safetensors"))) > 1
    referee = AutoModelForCausalLM.from_pretrained(tmp_path / "grown", dtype=torch.float32).eval()
    with torch.no_grad():
        found = referee(SEQUENCE[None]).logits[0].double()
    assert found.shape[1] == config.vocab_size
    torch.testing.assert_close(found[:, :VOCAB], expected, atol=2e-4, rtol=0)


def test_what_gives_way_to_the_function_is_noted() -> None:
    def notes(case: str) -> tuple[str, ...]:
        small, large = CASES[case]
        return grow_config(small, Geometry("large", large)).notes

    assert (
        notes("llama")
        == notes("llama into qwen2")
        == notes("qwen3")
        == notes("llama into an untied head")
        == ()
    )
    assert notes("llama into qwen3")[0].startswith("llama in place of qwen3 (norms of queries and keys): ")
    assert notes("qwen2 into llama")[0].startswith("qwen2 (biases) in place of llama: ")
    assert notes("llama, untied, into a tied head")[0].startswith("a head of its own in place of a tied one")
    assert notes("llama into fewer layers")[0].startswith("4 layers with MLPs of 320 in place of 3 with 512")


def test_a_token_reads_as_many_weights_where_layers_have_to_be_more() -> None:
    """Llama 3.2 1B has 16 layers, the Countdown base 20."""
    small, large = like(SMALL, num_layers=20), GEOMETRIES["llama-3.2-1b"]
    grown = grow_config(small, Geometry("llama", large)).config
    sizes = [sum(shape.numel() for shape in expected_shapes(config).values()) for config in (large, grown)]
    assert grown.num_layers == 20
    assert abs(sizes[1] / sizes[0] - 1) < 0.01


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("qwen2.5-7b", 7.616),
        ("llama-3.2-1b", 1.236),
        ("qwen3-8b", 8.191),
    ],
)
def test_named_geometries_have_the_parameters_that_their_model_cards_tell(name: str, billions: float) -> None:
    shapes = expected_shapes(find_geometry(name).sizes)
    assert round(sum(shape.numel() for shape in shapes.values()) / 1e9, 3) == billions


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hidden_size": 32}, "large has hidden_size 32, but the small model takes 33; give a larger one"),
        ({"vocab_size": 28}, "has vocab_size 28, but the small model takes 29"),
        ({"intermediate_size": 40}, "has intermediate_size 40, but the small model takes 48"),
        ({"num_heads": 2, "num_kv_heads": 2}, "has num_key_value_heads 2, but the small model takes 4"),
        ({"head_dim": 12}, "large: heads of 12 do not repeat the rotary frequencies of the small model's 8"),
    ],
)
def test_a_geometry_without_room_is_refused_in_one_line(changes: dict[str, int], part: str) -> None:
    with pytest.raises(UserError) as refused:
        grow_config(SMALL, Geometry("large", like(LARGE, **changes)))
    assert str(refused.value).startswith("--geometry: ")
    assert part in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_geometry_is_a_name_or_a_config_file(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    write_hf_json(folder / "config.json", config_to_hf(LARGE, torch.float32))
    assert find_geometry("Qwen2.5-0.5B").name == "qwen2.5-0.5b"
    assert (
        find_geometry(str(folder))
        == find_geometry(str(folder / "config.json"))
        == Geometry("my-model", LARGE)
    )
    with pytest.raises(
        UserError,
        match=r"^--geometry: 'qwen9' is unknown; give qwen2\.5-0\.5b, .* or the path of a config\.json$",
    ):
        find_geometry("qwen9")
    write_hf_json(
        folder / "config.json", config_to_hf(LARGE, torch.float32) | {"architectures": ["GemmaForCausalLM"]}
    )
    with pytest.raises(OtherComputation, match=r"architectures is .*Gemma"):
        find_geometry(str(folder))

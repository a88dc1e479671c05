"""Hugging Face's tiny models as the referee, and ours with the same weights: packed, prefilled and decoded.

All weights are random, the norms and biases included, so that nothing passes by being one or zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.lossless.helpers import pack
from tlt.models.attention import Cached, PackedCausal, StoringPrefill
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.config import parse_config
from tlt.models.packed import PackedTransformer
from tlt.speculation.law.tree import chain_mask

VOCAB = 61
PROMPTS = ((7, 3, 44, 9, 60), (1,), (12, 12, 5, 33, 28, 2, 0, 59, 17))

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 3e-3,  # large enough to matter
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def plain(theta: float) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta}


CASES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=4, rope_parameters=plain(10000.0)),
    "llama-gqa2-rope3": LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=LLAMA3, head_dim=20),
    "llama-gqa4-tied": LlamaConfig(
        **SIZES, num_key_value_heads=1, rope_parameters=plain(500.0), head_dim=32, tie_word_embeddings=True
    ),
    "qwen2-gqa2": Qwen2Config(**SIZES, num_key_value_heads=2, rope_parameters=plain(1e6)),
    "qwen2-tied": Qwen2Config(
        **SIZES, num_key_value_heads=4, rope_parameters=plain(100.0), tie_word_embeddings=True
    ),
    "qwen3-gqa4": Qwen3Config(**SIZES, num_key_value_heads=1, rope_parameters=plain(1e6), head_dim=24),
    "qwen3-tied": Qwen3Config(
        **SIZES, num_key_value_heads=2, rope_parameters=plain(50.0), head_dim=16, tie_word_embeddings=True
    ),
}
EXACT = {torch.float32: 1e-4, torch.float64: 1e-10}


# ── the referee ─────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Draws all weights, norms and biases included; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 0.4 if "norm" in name else 0.5 if "bias" in name else 0.17
        parameter.copy_(scale * noise + (1.0 if "norm" in name else 0.0))
    return model


def referee(case: str, dtype: torch.dtype) -> PreTrainedModel:
    """Hugging Face's model with random weights."""
    model = draw_weights(AutoModelForCausalLM.from_config(CASES[case]).eval(), seed=len(case))
    return in_float64(model) if dtype == torch.float64 else model.to(dtype)


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model in float64. Even then transformers passes through float32 in its norms, its rotary angles and
    its eager attention's softmax: the first two are replaced by the plain formulas, the last by PyTorch's."""
    frequencies = float64_frequencies(model.config)
    torch.testing.assert_close(
        frequencies.float(), model.model.rotary_emb.inv_freq.float(), rtol=1e-5, atol=0
    )
    model.double()
    model.set_attn_implementation("sdpa")
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):
            exact = nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon)
            exact.weight = module.weight
            model.set_submodule(name, exact)
    model.model.rotary_emb = Float64Rotary(frequencies)
    return model


class Float64Rotary(nn.Module):
    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def float64_frequencies(config: PreTrainedConfig) -> Tensor:
    """Llama 3.1's published rule, one frequency at a time."""
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = []
    for i in range(0, head_dim, 2):
        frequency = 1.0 / rope["rope_theta"] ** (i / head_dim)
        if rope["rope_type"] == "llama3":
            wavelength, original = 2 * math.pi / frequency, rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > original / low:
                frequency /= rope["factor"]
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        frequencies.append(frequency)
    return torch.tensor(frequencies, dtype=torch.float64)


def referee_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([token_ids])).logits[0]


# ── ours ────────────────────────────────────────────────────────────────────────────────────────────────────


def our_config(theirs: PreTrainedConfig) -> ModelConfig:
    architecture = type(theirs).__name__.replace("Config", "ForCausalLM")
    return parse_config(theirs.to_dict() | {"architectures": [architecture]}, "referee")


def trainable(model: PreTrainedModel) -> Transformer:
    ours = Transformer(our_config(model.config)).to(model.dtype)
    ours.load_state_dict({name: parameter.detach() for name, parameter in model.named_parameters()})
    return ours


def packed(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PackedTransformer:
    return pack(trainable(model), dtype or model.dtype)


def packed_logits(ours: Transformer | PackedTransformer, sequences: Sequence[Sequence[int]]) -> Tensor:
    """[sum of lengths, V] in one packed batch."""
    attend = PackedCausal(ours.config, [len(sequence) for sequence in sequences])
    token_ids_N = torch.tensor([token for sequence in sequences for token in sequence])
    return ours.logits(ours.forward(token_ids_N, attend.positions(), attend))


def stale_cache(config: ModelConfig, num_slots: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """A cache that was used before: whoever reads an entry never written sees large numbers."""
    shape = (num_slots, 2 * config.num_kv_heads, length, config.head_dim)
    return [torch.full(shape, 1e3, dtype=dtype) for _ in range(config.num_layers)]


def prefill(ours: PackedTransformer, prompts: Sequence[Sequence[int]], cache: list[Tensor]) -> Tensor:
    """Stores the prompts in slots 0.. and returns the logits of their last tokens, [B, V]."""
    lengths = [len(prompt) for prompt in prompts]
    attend = StoringPrefill(
        ours.config, [(length, (0,)) for length in lengths], cache, slots=range(len(prompts))
    )
    token_ids_N = torch.tensor([token for prompt in prompts for token in prompt])
    features_NE = ours.forward(token_ids_N, attend.positions(), attend)
    return ours.logits(features_NE[torch.tensor(lengths).cumsum(0) - 1])


def decode(ours: PackedTransformer, tokens_B: Tensor, lengths_B: Tensor, cache: list[Tensor]) -> Tensor:
    """One token for each sequence, written at its length; logits [B, V]."""
    length = int(lengths_B.max()) + 1
    columns_B1 = lengths_B[:, None]
    attend = Cached(ours.config, cache, columns_B1, length, chain_mask(columns_B1, length, ours.dtype))
    return ours.logits(ours.forward(tokens_B, lengths_B, attend))


def generate_greedily(
    ours: PackedTransformer, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    lengths_B = torch.tensor([len(prompt) for prompt in prompts])
    cache = stale_cache(ours.config, len(prompts) + 1, int(lengths_B.max()) + num_tokens, ours.dtype)
    tokens_B = prefill(ours, prompts, cache).argmax(-1)
    generated = [tokens_B]
    for _ in range(num_tokens - 1):
        tokens_B = decode(ours, tokens_B, lengths_B, cache).argmax(-1)
        lengths_B = lengths_B + 1
        generated.append(tokens_B)
    return torch.stack(generated, dim=1).tolist()


def target_of(config: ModelConfig, dtype: torch.dtype) -> PackedTransformer:
    """Random, norms and biases included."""
    model = Transformer(config).initialize(0, 0.1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    target = PackedTransformer(config, dtype)
    target.load(dict(model.named_parameters()), 0)
    return target

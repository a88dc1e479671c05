"""The decoder against Hugging Face's own models: logits, gradients, generation, trees. All weights are random, the
norms and biases included, so that nothing passes by being one or zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from tlt.models import cpu_kernels
from tlt.models.attention import Cached, CachedBySequence, PackedCausal, StoringPrefill, cached, padding_mask, real_tokens
from tlt.models.decoder import Linear, ModelConfig, Transformer, rope_inverse_frequencies
from tlt.models.hf_config import parse_config
from tlt.models.packed import PackedLinear, PackedTransformer
from tlt.speculative.tree import chain_mask

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
    "qwen2-tied": Qwen2Config(**SIZES, num_key_value_heads=4, rope_parameters=plain(100.0), tie_word_embeddings=True),
    "qwen3-gqa4": Qwen3Config(**SIZES, num_key_value_heads=1, rope_parameters=plain(1e6), head_dim=24),
    "qwen3-tied": Qwen3Config(
        **SIZES, num_key_value_heads=2, rope_parameters=plain(50.0), head_dim=16, tie_word_embeddings=True
    ),
}
EXACT = {torch.float32: 1e-4, torch.float64: 1e-10}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


# ── the referee ──────────────────────────────────────────────────────────────────────────────────────────────────────


def referee(case: str, dtype: torch.dtype) -> PreTrainedModel:
    """Hugging Face's model with random weights. transformers passes through float32 in its norms and rotary angles
    even when the model is float64; there those two are replaced by the plain formulas."""
    model = AutoModelForCausalLM.from_config(CASES[case]).eval()
    generator = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.4 * noise if "norm" in name else 0.5 * noise if "bias" in name else 0.17 * noise)
    if dtype != torch.float64:
        return model.to(dtype)
    frequencies = float64_frequencies(model.config)
    torch.testing.assert_close(frequencies.float(), model.model.rotary_emb.inv_freq, rtol=1e-5, atol=0)
    model.double()
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


# ── ours ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def our_config(theirs: PreTrainedConfig) -> ModelConfig:
    architecture = type(theirs).__name__.replace("Config", "ForCausalLM")
    return parse_config(theirs.to_dict() | {"architectures": [architecture]}, "referee")


def trainable(model: PreTrainedModel) -> Transformer:
    ours = Transformer(our_config(model.config)).to(model.dtype)
    ours.load_state_dict({name: parameter.detach() for name, parameter in model.named_parameters()})
    return ours


def packed(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PackedTransformer:
    return PackedTransformer.from_module(trainable(model), dtype or model.dtype)


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
    attend = StoringPrefill(ours.config, lengths, cache, slots=range(len(prompts)))
    token_ids_N = torch.tensor([token for prompt in prompts for token in prompt])
    features_NE = ours.forward(token_ids_N, attend.positions(), attend)
    return ours.logits(features_NE[torch.tensor(lengths).cumsum(0) - 1])


def decode(ours: PackedTransformer, tokens_B: Tensor, lengths_B: Tensor, cache: list[Tensor]) -> Tensor:
    """One token for each sequence, written at its length; logits [B, V]."""
    length = int(lengths_B.max()) + 1
    mask = padding_mask(lengths_B + 1, length, ours.dtype)
    attend = Cached(ours.config, cache, lengths_B[:, None], length, mask)
    return ours.logits(ours.forward(tokens_B, lengths_B, attend))


def generate_greedily(ours: PackedTransformer, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    lengths_B = torch.tensor([len(prompt) for prompt in prompts])
    cache = stale_cache(ours.config, len(prompts) + 1, int(lengths_B.max()) + num_tokens, ours.dtype)
    tokens_B = prefill(ours, prompts, cache).argmax(-1)
    generated = [tokens_B]
    for _ in range(num_tokens - 1):
        tokens_B = decode(ours, tokens_B, lengths_B, cache).argmax(-1)
        lengths_B = lengths_B + 1
        generated.append(tokens_B)
    return torch.stack(generated, dim=1).tolist()


# ── tests ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_both_transformers_give_the_logits_of_hugging_face(case: str, dtype: torch.dtype) -> None:
    model = referee(case, dtype)
    sequence = [i * 37 % VOCAB for i in range(100)]
    expected = referee_logits(model, sequence)
    assert expected.std() > 0.5
    for ours in (trainable(model), packed(model)):
        torch.testing.assert_close(packed_logits(ours, [sequence]), expected, atol=EXACT[dtype], rtol=0)


def test_the_scaled_frequencies_cover_all_three_bands_of_llama3() -> None:
    scaled = rope_inverse_frequencies(our_config(CASES["llama-gqa2-rope3"]))
    unscaled = 500.0 ** -(torch.arange(0, 20, 2, dtype=torch.float64) / 20)
    ratio = scaled / unscaled
    assert (ratio > 1 - 1e-12).any()
    assert (ratio < 0.125 + 1e-12).any()
    assert ((ratio > 0.13) & (ratio < 0.99)).any()


def test_gradients_are_those_of_hugging_face(case: str) -> None:
    model = referee(case, torch.float64)
    ours = trainable(model)
    sequence = torch.tensor(PROMPTS[2])
    F.cross_entropy(referee_logits(model, sequence.tolist())[:-1], sequence[1:]).backward()
    F.cross_entropy(packed_logits(ours, [sequence.tolist()])[:-1], sequence[1:]).backward()
    expected = dict(model.named_parameters())
    assert expected.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, atol=1e-10, rtol=1e-8, msg=lambda m, name=name: f"{name}: {m}"
        )


@torch.no_grad()
def test_greedy_decoding_from_the_cache_generates_what_hugging_face_generates(case: str) -> None:
    model = referee(case, torch.float32)
    num_tokens = 24
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert len({token for tokens in expected for token in tokens}) > 8  # no constant loop
    assert generate_greedily(packed(model), PROMPTS, num_tokens) == expected


@torch.no_grad()
def test_a_packed_batch_equals_its_sequences_alone(case: str) -> None:
    model = referee(case, torch.float64)
    for ours in (trainable(model), packed(model)):
        alone = torch.cat([packed_logits(ours, [prompt]) for prompt in PROMPTS])
        torch.testing.assert_close(packed_logits(ours, PROMPTS), alone, atol=1e-11, rtol=0)


@torch.no_grad()
def test_a_changed_token_changes_nothing_before_it_and_nothing_in_other_sequences() -> None:
    ours = packed(referee("qwen3-gqa4", torch.float64))
    changed = (PROMPTS[0], PROMPTS[1], (*PROMPTS[2][:4], 29, *PROMPTS[2][5:]))
    difference = (packed_logits(ours, PROMPTS) - packed_logits(ours, changed)).abs().amax(-1)
    first = len(PROMPTS[0]) + len(PROMPTS[1]) + 4
    assert difference[:first].max() < 1e-11
    assert difference[first:].min() > 1e-3


@torch.no_grad()
def test_decoding_without_a_mask_equals_decoding_with_one() -> None:
    ours = packed(referee("qwen2-gqa2", torch.float64))
    prompts = [PROMPTS[2], PROMPTS[2][::-1]]
    cache = stale_cache(ours.config, 2, 12, torch.float64)
    prefill(ours, prompts, cache)
    lengths_B, tokens_B = torch.tensor([9, 9]), torch.tensor([3, 4])
    masked = decode(ours, tokens_B, lengths_B, cache)
    attend = Cached(ours.config, cache, lengths_B[:, None], 10, None)
    torch.testing.assert_close(ours.logits(ours.forward(tokens_B, lengths_B, attend)), masked, atol=1e-11, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_one_forward_over_a_tree_equals_decoding_each_of_its_paths(case: str, seed: int) -> None:
    model = referee(case, torch.float64)
    ours = packed(model)
    num_nodes, B, longest = 11, len(PROMPTS), max(map(len, PROMPTS))
    generator = torch.Generator().manual_seed(seed)
    tokens_BN = torch.randint(VOCAB, (B, num_nodes), generator=generator)
    parents_BN = [[-1] + [int(torch.randint(n, (), generator=generator)) for n in range(1, num_nodes)] for _ in range(B)]
    paths_BN = [[path_to(parents, node) for node in range(num_nodes)] for parents in parents_BN]

    # Nodes lie behind the prompt, in the order of their columns; each sees the prompt and its own path.
    prompt_lengths_B1 = torch.tensor([len(prompt) for prompt in PROMPTS])[:, None]
    columns_BN = prompt_lengths_B1 + torch.arange(num_nodes)
    positions_BN = prompt_lengths_B1 + torch.tensor([[len(path) - 1 for path in paths] for paths in paths_BN])
    length = longest + num_nodes
    mask_BNL = torch.full((B, num_nodes, length), float("-inf"), dtype=torch.float64)
    for b, prompt in enumerate(PROMPTS):
        mask_BNL[b, :, : len(prompt)] = 0
        for node, path in enumerate(paths_BN[b]):
            mask_BNL[b, node, [len(prompt) + column for column in path]] = 0
    cache = stale_cache(ours.config, B, length, torch.float64)
    prefill(ours, PROMPTS, cache)
    attend = Cached(ours.config, cache, columns_BN, length, mask_BNL)
    verified_BNV = ours.logits(ours.forward(tokens_BN.flatten(), positions_BN.flatten(), attend)).unflatten(0, (B, num_nodes))

    for b, prompt in enumerate(PROMPTS):
        for node in (node for node in range(num_nodes) if node not in parents_BN[b]):  # the leaves cover all nodes
            path, cache_of_path = paths_BN[b][node], stale_cache(ours.config, 1, length, torch.float64)
            prefill(ours, [prompt], cache_of_path)
            for depth, column in enumerate(path):
                sequential = decode(ours, tokens_BN[b, column, None], torch.tensor([len(prompt) + depth]), cache_of_path)
                torch.testing.assert_close(verified_BNV[b, column], sequential[0], atol=1e-10, rtol=0)
            expected = referee_logits(model, [*prompt, *tokens_BN[b, path].tolist()])[len(prompt) :]
            torch.testing.assert_close(verified_BNV[b, path], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("num_new", [1, 5])
def test_a_ragged_batch_sequence_by_sequence_equals_the_padded_one(num_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, lengths = ModelConfig("llama", VOCAB, 32, 64, 1, 4, 2, 8, tie_embeddings=True, max_positions=160), [37, 2, 90, 11]
    generator = torch.Generator().manual_seed(num_new)
    qkv_NSD = torch.randn(4 * num_new, config.num_qkv, config.head_dim, generator=generator, dtype=torch.float64)
    prefix_B, length = torch.tensor(lengths), max(lengths) + num_new
    mask = chain_mask(num_new, prefix_B, length, torch.float64)
    columns_BT, outputs = prefix_B[:, None] + torch.arange(num_new), []
    counts = [min(count, num_new) for count in (1, 4, 2, 5)]  # new tokens of each, and of how many of them nobody knows
    real_N = real_tokens(counts, num_new, torch.device("cpu"))
    for waste, counted in ((10**9, None), (-1, None), (10**9, counts), (-1, counts)):
        monkeypatch.setattr(cpu_kernels, "MIN_WASTE", waste)
        cache = stale_cache(config, 4, length + 7, torch.float64)
        visible = [n + new for n, new in zip(lengths, counted or [num_new] * 4, strict=True)]
        attend = cached(config, cache, columns_BT, length, mask, visible, counted)
        assert isinstance(attend, CachedBySequence) == (waste < 0)
        out_NC = attend(0, qkv_NSD if counted is None else qkv_NSD[real_N])
        outputs.append(out_NC[real_N] if counted is None else out_NC)
    for output in outputs[1:]:
        torch.testing.assert_close(outputs[0], output, atol=0, rtol=1e-12)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Columns from the root to the node, both included."""
    return [node] if node == 0 else [*path_to(parents, parents[node]), node]


@torch.no_grad()
def test_in_bfloat16_the_packed_transformer_is_as_close_to_float32_as_hugging_face_is(case: str) -> None:
    exact = referee_logits(referee(case, torch.float32), PROMPTS[2])
    rounded = referee_logits(referee(case, torch.bfloat16), PROMPTS[2]).float()
    ours = packed_logits(packed(referee(case, torch.float32), torch.bfloat16), [PROMPTS[2]])
    assert ours.dtype == torch.bfloat16
    error, allowed = (ours.float() - exact).norm() / exact.norm(), (rounded - exact).norm() / exact.norm()
    assert error < 0.05
    assert error < 1.5 * allowed


@torch.no_grad()
def test_in_bfloat16_no_norm_is_folded_so_that_weights_are_not_rounded_twice() -> None:
    model = referee("llama", torch.bfloat16)
    ours, theirs = packed(model).layers[1], model.model.layers[1]
    assert ours.qkv_linear.weight is not None
    assert ours.gate_up_linear.weight is not None
    assert torch.equal(ours.qkv_linear.weight[:48], theirs.self_attn.q_proj.weight)
    assert torch.equal(ours.gate_up_linear.weight[80:], theirs.mlp.up_proj.weight)


@pytest.mark.parametrize(("num_in", "num_out"), [(32, 96), (512, 700)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_matrix_multiplies_as_a_plain_one_whichever_kernel_runs(num_in: int, num_out: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(num_out, num_in, generator=generator), torch.randn(num_out, generator=generator)
    linear = PackedLinear(num_in, num_out, torch.float32, torch.device("cpu"), has_bias=has_bias)
    linear.load(weight, bias if has_bias else None)
    if torch.backends.mkldnn.is_available():
        assert (linear.weight is None) == (num_in * num_out >= 320_000), "a large matrix exists once"
    for rows in (1, 3, 40, 300):
        x, residual = torch.randn(rows, num_in, generator=generator), torch.randn(rows, num_out, generator=generator)
        expected = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-3)
        if not has_bias:
            before = residual.clone()
            torch.testing.assert_close(linear.add_to(residual, x).double(), expected + residual, rtol=1e-5, atol=1e-3)
            assert torch.equal(residual, before)
    with pytest.raises(RuntimeError, match="was expected"):
        linear.load(weight[:-1])


@pytest.mark.parametrize("rows", [7, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_trainable_linear_and_its_gradients_are_those_of_torch(rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    ours = Linear(40, 96, bias=has_bias)
    theirs = nn.Linear(40, 96, bias=has_bias).double()
    theirs.load_state_dict(ours.state_dict())
    inputs = torch.randn(rows, 40)
    x, y = inputs.clone().requires_grad_(), inputs.double().requires_grad_()
    weights = torch.randn(rows, 96)
    (ours(x) * weights).sum().backward()
    (theirs(y) * weights).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-4)
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), expected.grad, rtol=1e-4, atol=1e-3)


def test_a_model_is_packed_for_its_own_device_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        ours = PackedTransformer(our_config(CASES["llama"]), torch.float32, "cpu")
    assert ours.rope.cos_P1D.device.type == "cpu"


@torch.no_grad()
def test_a_packed_transformer_reports_its_version_and_refuses_a_policy_with_a_tensor_missing(case: str) -> None:
    model = referee(case, torch.float32)
    tensors = dict(model.named_parameters())
    ours = PackedTransformer(our_config(model.config), torch.float32)
    assert ours.version == -1
    for name in tensors:
        with pytest.raises(KeyError, match=name):
            ours.load({other: tensor for other, tensor in tensors.items() if other != name}, version=3)
    ours.load(tensors, version=4)
    assert ours.version == 4


@torch.no_grad()
def test_loading_another_policy_replaces_every_weight(case: str) -> None:
    model = referee(case, torch.float64)
    ours = PackedTransformer.from_module(Transformer(our_config(model.config)), torch.float64)
    ours.load(dict(model.named_parameters()), version=1)
    torch.testing.assert_close(packed_logits(ours, PROMPTS), packed_logits(packed(model), PROMPTS), atol=0, rtol=0)


def test_initialization_depends_on_the_seed_alone() -> None:
    config = our_config(CASES["qwen2-gqa2"])
    first, again, other = (dict(Transformer(config).initialize(seed).named_parameters()) for seed in (1, 1, 2))
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        assert torch.equal(parameter, other[name]) == (parameter.dim() == 1), name

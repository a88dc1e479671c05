"""Any decoder: engine and update against transformers' own model, for published configurations."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AttentionInterface

from tests.cases import cases
from tests.refused import refused
from tests.unit.models.compared import (
    adapter_gap,
    config_of,
    differing_tensors_when_saved_again,
    generated,
    gradient_error,
    logprob_gap,
    trainable,
)
from tests.unit.models.families import (
    EVERY,
    PUBLISHED,
    USUAL,
    VOCAB,
    families,
    logprobs,
    precision,
    reference,
    shrunk,
)
from tlt.base.speculation import parse_speculation
from tlt.base.types import Rollout
from tlt.drafter.shape import drafter_shape
from tlt.engine.build.engine import check_hybrid
from tlt.engine.build.vllm import refuse_on_cpu
from tlt.models.attention import PackedCausal, SharedPrompts
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.config import OtherComputation, config_to_hf, parse_config
from tlt.models.hf.families import CHECKED, HYBRIDS, load_model_config, parse_any
from tlt.models.hf.weights import StoredTensors, read_safetensors
from tlt.models.new import new_target
from tlt.training.update.micro_batches import Experience, plan_share

HYBRID = [name for name, raw in EVERY.items() if raw["model_type"] in HYBRIDS]
COMPUTED = [name for name, raw in PUBLISHED.items() if raw["model_type"] in CHECKED and name != "Phi-4-mini"]
COMPUTED = [name for name in COMPUTED if name not in HYBRID]
REFUSED = [name for name in PUBLISHED if name not in (*COMPUTED, *HYBRID)]
TEXT_PARTS = ["gemma-4-E2B", "gemma-4-26B-A4B", "Llama-4-Scout-17B-16E"]
"""Which the checkpoints that also read images hold."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    cases(
        product(COMPUTED + TEXT_PARTS, (torch.float64, torch.float32)),
        usual=[*((name, torch.float64) for name in USUAL), ("gemma-2-2b", torch.float32)],
    ),
    ids=str,
)
def test_trees_and_off_generate_what_transformers_computes(name: str, dtype: torch.dtype) -> None:
    found = generated(name, dtype)
    assert max(found.logprob_gap, found.greedy_gap) < (1e-4 if dtype == torch.float32 else precision(name))
    assert found.num_other == 0
    assert found.accept_length > 1.5


def own_config(name: str) -> ModelConfig | None:
    try:
        return parse_config(shrunk(name), "config.json")
    except OtherComputation:
        return None


@pytest.mark.parametrize("name", [name for name in COMPUTED if own_config(name) is not None])
def test_our_own_decoder_computes_what_transformers_does_and_is_saved_as_it_was(name: str) -> None:
    config, model = own_config(name), reference(name)
    assert config is not None
    own = Transformer(config).double()
    own.load_state_dict({path: model.state_dict()[path] for path in own.state_dict()})
    tokens = torch.randint(4, VOCAB, (120,), generator=torch.Generator().manual_seed(0))
    attend = SharedPrompts(config, [(120, [0])])
    with torch.no_grad():
        found_NV = own.logits(own(tokens, attend.positions(), attend)).log_softmax(-1)
    assert torch.allclose(found_NV, logprobs(model, tokens.tolist()), rtol=0, atol=1e-4)  # float32 positions
    assert parse_config(config_to_hf(config, torch.float32), "written") == config


def test_our_own_decoder_is_the_fast_path_of_plain_families() -> None:
    own = {PUBLISHED[name]["model_type"] for name in COMPUTED if own_config(name) is not None}
    assert own == {"llama", "mistral", "qwen2", "qwen3", "seed_oss"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_batched_or_was_not_compared_is_refused_in_a_line(name: str) -> None:
    with pytest.raises(OtherComputation) as refusal:
        config_of(name)
    assert str(refusal.value).startswith("config.json: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("gemma-3-1b", {"use_bidirectional_attention": True}),
        ("Olmo-3.1-32B", {"layer_types": ["chunked_attention"] * 4}),
        ("Mistral-7B-v0.1", {"sliding_window": 15}),
        ("Mistral-7B-v0.1", {"hidden_act": "tlt.x:y"}),
        ("gemma-3-1b", {"hidden_activation": "tlt.x:y"}),
        ("Olmo-3.1-32B", {"hidden_act": "swish2"}),
        ("Hunyuan-7B", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "mxfp4"}}),
    ],
)
def test_a_flag_that_attention_would_have_to_know_is_refused(name: str, changed: dict[str, Any]) -> None:
    with refused(f"config.json: {next(iter(changed))} is "):
        parse_any(shrunk(name) | changed, "config.json")


def test_an_argument_of_attention_that_nobody_here_knows_is_refused_and_an_absent_one_is_not() -> None:
    module = reference("Qwen3-0.6B").get_submodule("model.layers.0.self_attn")
    query, key, value = torch.randn(3, 1, 2, 6, 16, dtype=torch.float64).unbind()

    def attended(**given: Any) -> torch.Tensor:
        out, _ = AttentionInterface()["tlt"](
            module, query.repeat(1, 2, 1, 1), key, value, None, attend=attend, **given
        )
        return out

    attend = PackedCausal(config_of("Qwen3-0.6B"), [6])
    known = attended(scaling=0.25, position_ids=torch.arange(6), use_cache=False, score_bias=None)
    assert torch.equal(known, attended())
    with refused("Qwen3Attention asks attention for block_mask, score_bias, which is not computed here"):
        attended(score_bias=torch.ones(6), block_mask=False)


@pytest.mark.parametrize("name", families(COMPUTED + TEXT_PARTS + HYBRID))
def test_packed_families_have_the_gradients_of_one_sequence_at_a_time(name: str) -> None:
    assert gradient_error(name) < 1e-5


@pytest.mark.parametrize("name", HYBRID)
def test_the_update_has_a_hybrid_s_log_probabilities_with_and_without_adapters(name: str) -> None:
    assert logprob_gap(name, torch.float64) < 1e-9
    assert logprob_gap(name, torch.float32) < 1e-4
    assert adapter_gap(name) < 1e-9


def test_a_hybrid_s_update_computes_one_response_at_a_time() -> None:
    config = config_of("LFM2-1.2B")
    responses = [
        Experience(Rollout("p", i, (1,), (4, 5), (0.0, 0.0), "length", 0), (1.0, 1.0), True) for i in range(3)
    ]
    assert [len(batch.responses) for batch in plan_share(responses, config, 8192, 1, 0)] == [1, 1, 1]
    own, attend = trainable("LFM2-1.2B"), PackedCausal(config, [4, 6])
    with pytest.raises(AssertionError, match="a state would go on from one sequence to the next"):
        own(torch.arange(10), attend.positions(), attend)


def test_a_hybrid_generates_in_vllm_alone_without_drafts() -> None:
    config, off, fixed = config_of("LFM2-1.2B"), parse_speculation("off"), parse_speculation("4x1x4")
    check_hybrid(config, "vllm", off)
    check_hybrid(config_of("Qwen3-0.6B"), "tlt", fixed)
    with refused(
        "engine: tlt cannot generate with this model: its linear attention or convolutions .*; give vllm"
    ):
        check_hybrid(config, "tlt", off)
    with refused("speculation: is 4x1x4, but this model cannot be drafted for: .*; give off"):
        check_hybrid(config, "vllm", fixed)
    with refused("model: its linear attention or convolutions .*, so no drafter can read it"):
        new_target(config, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM's kernels for CPUs")
@pytest.mark.parametrize("name", ["LFM2-1.2B", "Qwen3-Next-80B-A3B"])
def test_what_vllm_computes_wrongly_on_a_cpu_is_refused(name: str) -> None:
    refuse_on_cpu(config_of("Qwen3-0.6B"))
    with refused(r"engine: vllm .* wrongly on a CPU; run it on a GPU$"):
        refuse_on_cpu(config_of(name))


def test_llama_4_is_computed_up_to_its_chunk_and_its_first_change_of_temperature() -> None:
    raw = {**shrunk("Llama-4-Scout-17B-16E"), "attention_chunk_size": 128}
    assert parse_any(raw, "config.json").max_positions == 128
    assert parse_any(raw | {"floor_scale": 64}, "config.json").max_positions == 63
    assert (
        parse_any(raw | {"floor_scale": 64, "attn_temperature_tuning": False}, "config.json").max_positions
        == 128
    )


@pytest.mark.parametrize(
    "name",
    families(
        ["gemma-3-1b", "Mixtral-8x7B", "GLM-4.5-Air", "gpt-oss-20b", "Apertus-8B", *TEXT_PARTS, *HYBRID],
        usual=["Mixtral-8x7B", "GLM-4.5-Air", *USUAL],
    ),
)
def test_a_checkpoint_is_read_and_written_with_transformers_names(name: str, tmp_path: Path) -> None:
    """Experts are fused in a module and single in a file; GLM and Apertus store buffers, too."""
    assert differing_tensors_when_saved_again(name, tmp_path) == []


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    reference("Mixtral-8x7B", torch.float32).save_pretrained(tmp_path)
    tensors = read_safetensors(tmp_path)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused("model.layers.1.block_sparse_moe.experts.0.w1.weight .* config.json asks for"):
        StoredTensors(tmp_path, load_model_config(tmp_path))


@pytest.mark.parametrize(
    ("name", "surplus", "unknown"),
    [
        ("GLM-4.5-Air", "model.layers.46.eh_proj.weight", "model.layers.4.eh_proj.weight"),
        ("Qwen3-Next-80B-A3B", "mtp.fc.weight", "model.mtp.fc.weight"),
    ],
)
def test_what_transformers_leaves_out_of_a_checkpoint_is_left_out(
    name: str, surplus: str, unknown: str, tmp_path: Path
) -> None:
    """Multi-token prediction."""
    reference(name, torch.float32).save_pretrained(tmp_path)
    file, tensors = tmp_path / "model.safetensors", read_safetensors(tmp_path)
    config = load_model_config(tmp_path)
    before = list(StoredTensors(tmp_path, config))
    save_file(tensors | {surplus: torch.ones(2, 2)}, file, metadata={"format": "pt"})
    assert list(StoredTensors(tmp_path, config)) == before
    save_file(tensors | {unknown: torch.ones(2, 2)}, file, metadata={"format": "pt"})
    with refused(f"{unknown} is unknown"):
        StoredTensors(tmp_path, config)


@pytest.mark.parametrize(
    ("name", "theta", "eps"),
    [("Qwen3-30B-A3B", 1e6, 1e-6), ("GLM-4.5-Air", 1e6, 1e-5), ("gemma-2-2b", 1e4, 1e-6)],
)
def test_a_new_drafter_has_its_targets_positions_and_norms(name: str, theta: float, eps: float) -> None:
    layer = drafter_shape(config_of(name)).layer
    assert (layer.rope_theta, layer.rms_norm_eps) == (theta, eps)

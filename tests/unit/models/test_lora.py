"""LoRA on one rank: what trains, what it computes, what is published and saved, and one line for every
mistake. Float64, two layers, vocabulary 61. That it is PEFT's LoRA, tests/referee/test_peft.py shows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import HashStore

from tests.refused import refused
from tests.unit.training.update.test_policy import OPTIMIZER, make_batch, make_trainer
from tlt.apps.cli.train import resolve_config
from tlt.apps.plan.fit import fits, judge
from tlt.apps.plan.memory import plan_memory
from tlt.apps.plan.sizes import PlannedRun
from tlt.apps.run.start import describe_lora
from tlt.base.config.load import load_config
from tlt.base.config.lora import LoraSection
from tlt.base.config.schema import Config
from tlt.base.types import UserError
from tlt.engine.build.model import Model
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.peft import save_adapter
from tlt.models.lora import BaseOf, adapted, count_adapters, is_of_adapter, start_value
from tlt.models.packed import PackedTransformer, layer_by_layer
from tlt.training.build.policy import build_policy, build_policy_trainer, policy_on_meta
from tlt.training.ranks.sharding import FullTensors
from tlt.training.ranks.world import World
from tlt.training.update.update import PolicyTrainer

LLAMA = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 8, max_positions=256)
SHAPES = {
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tie_embeddings=True),
    "qwen2": replace(LLAMA, architecture="qwen2"),
    "qwen3 tied": replace(LLAMA, architecture="qwen3", tie_embeddings=True),
}
TOKENS = ((7, 3, 44, 9, 60), (1,), (12, 5, 33))


def make_config(dtype: str = "float64", **lora: Any) -> Config:
    values = {"rank": 4, "alpha": 6.0} | lora
    return Config.model_validate(
        {"model": {"path": "m"}, "task": {"name": "t"}, "run": {"dtype": dtype, "seed": 3}, "lora": values}
    )


def base_of(shape: ModelConfig) -> Transformer:
    return Transformer(shape).double().initialize(0, std=0.15)


def make_policy(shape: ModelConfig = LLAMA, config: Config | None = None) -> Transformer:
    """A policy of random weights, whose adapters do something, too."""
    tensors = {name: tensor.detach() for name, tensor in base_of(shape).state_dict().items()}
    config = config or make_config()
    policy = build_policy(
        policy_on_meta(config, shape), Model(Path(), shape, None, (), tensors), torch.device("cpu"), seed=3
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def inputs(config: ModelConfig) -> tuple[Tensor, Tensor, PackedCausal]:
    attend = PackedCausal(config, [len(tokens) for tokens in TOKENS])
    return torch.tensor([token for tokens in TOKENS for token in tokens]), attend.positions(), attend


@torch.no_grad()
def logits_of(model: Transformer | PackedTransformer | BaseOf) -> Tensor:
    run = model.forward if isinstance(model, PackedTransformer) else model
    return model.logits(run(*inputs(model.config)))


def trained(policy: Transformer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}


def frozen(policy: Transformer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters() if not p.requires_grad}


def are_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


# ── what it computes ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "lora", [{}, {"targets": ("v_proj", "down_proj"), "rslora": True}], ids=["all", "two, rslora"]
)
def test_the_published_matrices_compute_what_the_adapters_do(shape: str, lora: dict[str, Any]) -> None:
    policy = make_policy(SHAPES[shape], make_config(**lora))
    engine = PackedTransformer(SHAPES[shape], torch.float64)
    engine.load_parts(layer_by_layer(FullTensors(policy, torch.float64)), 1)
    whole = Transformer(SHAPES[shape]).double()
    whole.load_state_dict(dict(FullTensors(policy)))
    expected = logits_of(policy)
    assert (logits_of(whole) - expected).abs().max() < 1e-13
    assert (logits_of(engine) - expected).abs().max() < 1e-12
    assert (logits_of(base_of(SHAPES[shape])) - expected).abs().max() > 1e-2, "adapters do something"


def test_adapters_begin_as_pefts_do_by_seed_and_name_alone() -> None:
    shape = torch.Size((8, 4096))
    name = "model.layers.0.mlp.down_proj.lora_A.weight"
    start = start_value(name, shape, seed=3)
    assert start.abs().max() <= 1 / math.sqrt(4096)
    assert start.std() == pytest.approx(1 / math.sqrt(3 * 4096), rel=0.02), "uniform"
    assert torch.equal(start, start_value(name, shape, seed=3))
    assert not torch.equal(start, start_value(name, shape, seed=4))
    assert not torch.equal(start, start_value(name.replace("0", "1"), shape, seed=3))
    assert not start_value(name.replace("_A", "_B"), shape, seed=3).any()


def test_the_base_of_a_policy_computes_as_if_there_were_no_adapters_and_they_are_back_afterwards() -> None:
    policy = make_policy()
    base, before = BaseOf(policy), logits_of(policy)
    assert torch.equal(logits_of(base), logits_of(base_of(LLAMA)))
    with pytest.raises(TypeError):
        base()
    assert torch.equal(logits_of(policy), before)


# ── what trains ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "algorithm", [{}, {"kl_coefficient": 0.3}, {"kl_coefficient": 0.3, "name": "rloo"}, {"minibatches": 2}]
)
def test_adapters_alone_change_and_alone_have_moments(algorithm: dict[str, Any]) -> None:
    policy = make_policy()
    before, base = trained(policy), frozen(policy)
    trainer = make_trainer(
        policy, reference=BaseOf(policy) if "kl_coefficient" in algorithm else None, **algorithm
    )
    for step in range(2):
        trainer.update(*make_batch(step), step)
    assert are_equal(frozen(policy), base)
    assert before.keys() == {name for name, _ in policy.named_parameters() if is_of_adapter(name)}
    assert all((tensor != before[name]).any() for name, tensor in trained(policy).items())
    assert all(p.grad is None for p in policy.parameters())
    kept = trainer.tensors()
    assert {name.partition(".")[2] for name in kept if name.startswith("policy.")} == before.keys()
    assert len(kept) == 4 * len(before), "both moments, and the number of steps"


def test_the_update_is_that_of_the_whole_policy_projected_on_the_adapters() -> None:
    """By the chain rule, from a full update: d loss/dB = scale · (d loss/dW) Aᵀ, and d loss/dA = scale ·
    Bᵀ (d loss/dW)."""
    policy = make_policy()
    whole = Transformer(LLAMA).double()
    whole.load_state_dict(dict(FullTensors(policy)))
    found, expected = gradients_of_update(policy), gradients_of_update(whole)
    for name, layer in adapted(policy).items():
        a_RI, b_OR, prefix = layer.lora_A.weight, layer.lora_B.weight, name.removesuffix("weight")
        assert (found[f"{prefix}lora_A.weight"] - layer.scale * b_OR.T @ expected[name]).abs().max() < 1e-13
        assert (found[f"{prefix}lora_B.weight"] - layer.scale * expected[name] @ a_RI.T).abs().max() < 1e-13
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-3


def gradients_of_update(model: Transformer) -> dict[str, Tensor]:
    trainer = make_trainer(model)
    found: dict[str, Tensor] = {}

    def keep() -> None:
        found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})

    trainer.optimizer_section = OPTIMIZER.model_copy(update={"clip_grad_norm": 1e9})
    trainer.optimizer.step = keep  # type: ignore[method-assign]  # looks at them instead
    trainer.update(*make_batch(), 0)
    return found


ALONE = World(0, 1, 0, torch.device("cpu"), HashStore(), None)


def build_trainer(config: Config) -> PolicyTrainer:
    tensors = {name: tensor.detach().float() for name, tensor in base_of(LLAMA).state_dict().items()}
    return build_policy_trainer(config, Model(Path(), LLAMA, None, (), tensors), ALONE)


def test_a_base_in_bfloat16_trains_adapters_in_float32_and_publishes_them_merged_in_it() -> None:
    trainer = build_trainer(make_config("bfloat16", base_dtype="bfloat16"))
    trainer.update(*make_batch(), 0)
    policy = trainer.model
    assert {p.dtype for p in policy.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {tensor.dtype for tensor in trainer.tensors().values()} == {torch.float32}
    name = "model.layers.1.mlp.up_proj.weight"
    layer = adapted(policy)[name]
    expected = layer.weight.float() + layer.scale * layer.lora_B.weight @ layer.lora_A.weight
    assert torch.equal(FullTensors(policy)[name], expected)
    assert torch.equal(FullTensors(policy, torch.bfloat16)[name], expected.bfloat16())
    assert not torch.equal(expected, expected.bfloat16().float())


def test_a_kl_coefficient_makes_no_second_copy_of_a_policy_with_adapters() -> None:
    config = make_config(base_dtype=None)
    config = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"kl_coefficient": 0.1})}
    )
    assert isinstance(build_trainer(config).reference, BaseOf)
    without = config.model_copy(update={"lora": LoraSection()})
    assert isinstance(build_trainer(without).reference, Transformer)


def test_what_identifies_the_weights_sees_the_last_bit_of_what_is_frozen() -> None:
    config = make_config()
    trainer, other = build_trainer(config), build_trainer(config)
    trainer.update(*make_batch(), 0)
    other.restore(trainer.counters())
    assert other.next_step == 1
    assert other.initial_digest == trainer.initial_digest, "which training does not change"
    changed = dict(base_of(LLAMA).named_parameters())["model.layers.1.mlp.up_proj.weight"]
    tensors = {name: tensor.detach() for name, tensor in base_of(LLAMA).state_dict().items()}
    tensors["model.layers.1.mlp.up_proj.weight"] = changed.detach().nextafter(
        torch.tensor(9.0, dtype=torch.float64)
    )
    other = build_policy_trainer(config, Model(Path(), LLAMA, None, (), tensors), ALONE)
    assert other.initial_digest != trainer.initial_digest


# ── what is saved ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_adapter_is_saved_by_pefts_names_and_replaced_whole(tmp_path: Path) -> None:
    policy, config = make_policy(), make_config(targets=("q_proj", "k_proj"), rslora=True)
    (tmp_path / "adapter").mkdir()
    for _ in range(2):
        (tmp_path / "adapter" / "adapter_config.json").write_text("of another")
        save_adapter(tmp_path / "adapter", LLAMA, config.lora, trained(policy), "org/base", "main")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in names
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"], said["use_rslora"]) == (
        4,
        6,
        ["q_proj", "k_proj"],
        True,
    )
    assert (said["base_model_name_or_path"], said["revision"]) == ("org/base", "main")


# ── what a plan says ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_are_counted_before_anything_is_loaded(shape: str) -> None:
    expected = sum(tensor.numel() for tensor in trained(make_policy(SHAPES[shape])).values())
    assert count_adapters(SHAPES[shape], make_config().lora) == expected


def test_the_plan_counts_gradients_and_optimizer_of_the_adapters_alone() -> None:
    config = make_config("bfloat16", base_dtype="bfloat16")
    num, whole = count_adapters(LLAMA, config.lora), sum(p.numel() for p in base_of(LLAMA).parameters())
    plan = plan_memory(PlannedRun(config, LLAMA, None, 1, True, None, 16))
    parts = {term.name: term.num_bytes for term in plan.terms}
    assert (parts["frozen weights"], parts["adapters"]) == (2 * whole, 4 * num)
    assert (parts["optimizer"], parts["gradients"]) == (8 * num, 4 * num)
    kl = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_coefficient": 0.1})})
    without_reference = plan_memory(PlannedRun(kl, LLAMA, None, 1, True, None, 16))
    assert {term.name for term in without_reference.terms} == parts.keys()


def test_the_header_says_how_much_is_trained() -> None:
    said = describe_lora(make_config(targets=("q_proj", "v_proj")), 1_234_567, 7_620_000_000)
    assert said == ", LoRA of rank 4 on q_proj, v_proj: 1.2 M parameters beside 7.6 B frozen ones"
    assert describe_lora(make_config(rank=0, alpha=32.0), None, 7_620_000_000) == ""


def test_frozen_weights_in_bfloat16_are_a_remedy_where_they_do_not_fit() -> None:
    shape = replace(LLAMA, hidden_size=4096, intermediate_size=16384, num_heads=512, num_kv_heads=512)
    config = make_config("bfloat16", rank=8)
    num_layers = sum(p.numel() for p in policy_on_meta(config, shape).parameters()) * 2
    run = PlannedRun(config, shape, None, 1, True, None, 16)
    changes = {"lora.base_dtype": "bfloat16", "parallel.checkpoint_activations": True}
    smaller = plan_memory(run.changed(changes)).needed
    tight = replace(run, rank_bytes=smaller + num_layers // 8)
    assert not fits(tight)
    assert "lora.base_dtype = bfloat16" in judge(tight).line


# ── mistakes ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (
            {"targets": ("q_proj", "qkv_proj")},
            "lora.targets: the model has no matrix 'qkv_proj' to adapt; give some of"
            " q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        ),
        (
            {"targets": ("lm_head",)},
            "lora.targets: the model has no matrix 'lm_head' to adapt; give some of q_proj, ",
        ),
        ({"rank": 17}, "lora.rank: 17 is more than the smaller side of k_proj, 16; give at most 16"),
        (
            {"rank": 33, "targets": ("up_proj",)},
            "lora.rank: 33 is more than the smaller side of up_proj, 32; give at most 32",
        ),
    ],
)
def test_what_a_model_cannot_have_is_refused_in_a_line(lora: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        count_adapters(LLAMA, make_config(**lora).lora)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--lora.alpha", "16"],
            "alpha is set but rank is 0, so that there are no adapters: set rank, or remove alpha",
        ),
        (
            ["--lora.rank", "8", "--lora.targets", "q_proj,q_proj"],
            "targets names one twice (q_proj, q_proj): give it once",
        ),
        (
            ["--lora.rank", "8", "--lora.targets", "all-linear,q_proj"],
            "targets names all-linear, which is every matrix, and others: give it alone",
        ),
        (["--lora.rank", "8", "--lora.targets", ""], "lora.targets is "),
        (["--lora.rank", "-1"], "lora.rank is -1; it must be greater than or equal to 0"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_in_a_line(
    words: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        load_config({"model": {"path": str(tmp_path)}, "task": {"name": "t"}}, words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_resumed_run_keeps_its_adapters(tmp_path: Path) -> None:
    config = make_config().model_copy(
        update={"model": make_config().model.model_copy(update={"path": tmp_path})}
    )
    (tmp_path / "config.json").write_text(config.to_json())
    for words, said in (
        (["--lora.rank", "8"], "--resume: lora.rank is 8 but the run in "),
        (["--lora.targets", "q_proj"], "--resume: lora.targets is ['q_proj'] but the run in "),
    ):
        with refused(r"has .*; a resumed run keeps its configuration") as caught:
            resolve_config(None, words, tmp_path)
        assert str(caught.value).startswith(said)
    assert resolve_config(None, [], tmp_path).lora == config.lora

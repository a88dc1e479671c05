"""LoRA beside any decoder's matrices, and beside the tensors that experts share; without PEFT, which
tests/referee/test_peft_experts.py compares with."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cases import cases
from tests.refused import refused
from tests.unit.models.compared import config_of, logits_of, make_policy
from tests.unit.models.families import families, reference
from tests.unit.models.test_lora import make_config, trained
from tlt.apps.plan.memory import plan_memory
from tlt.apps.plan.sizes import PlannedRun
from tlt.base.types import UserError
from tlt.engine.build.model import load_model, open_model, open_start
from tlt.models.any import AnyTarget
from tlt.models.hf.peft import PREFIX, AdaptedTensors, save_adapter
from tlt.models.hf.weights import read_safetensors
from tlt.models.lora import BaseOf, adapted, count_adapters, prefix_of, targets_of
from tlt.training.ranks.sharding import FullTensors

EXPERTS = ["Qwen3-30B-A3B", "OLMoE-1B-7B", "Mixtral-8x7B", "gpt-oss-20b", "GLM-4.5-Air"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TENSORS = ("experts.gate_up_proj", "experts.down_proj")
DENSE = ("gate_proj", "up_proj", "down_proj")


KINDS = {
    **dict.fromkeys(EXPERTS[:4], (*ATTENTION, *TENSORS)),
    "GLM-4.5-Air": (*ATTENTION, *DENSE, *TENSORS),
    "phi-4": ("o_proj", "qkv_proj", "gate_up_proj", "down_proj"),
    "gemma-3-1b": (*ATTENTION, *DENSE),
    "Apertus-8B": (*ATTENTION, "up_proj", "down_proj"),
}


@pytest.mark.parametrize("name", families(KINDS, usual=["gpt-oss-20b", "GLM-4.5-Air", "phi-4"]))
def test_the_default_adapts_every_matrix_and_the_engine_gets_the_sum(name: str) -> None:
    policy = make_policy(name)
    assert set(targets_of(policy.config, make_config().lora)) == set(KINDS[name])
    expected = logits_of(policy)
    target = AnyTarget(policy.config, torch.float64)
    target.load(FullTensors(policy, torch.float64), 1)
    found, base = logits_of(target.model), logits_of(BaseOf(policy))
    assert (found - expected).abs().max() < 1e-12
    assert (base - expected).abs().max() > 1e-2, "adapters do something"
    stored = reference(name).state_dict()
    target.load({path: stored[path] for path in target.model.state_dict()}, 2)
    assert torch.equal(logits_of(target.model), base)
    (expected.log_softmax(-1)[:, 7] * torch.linspace(-1, 2, 42)).mean().backward()
    gradients = {path: p.grad for path, p in policy.named_parameters() if p.requires_grad}
    assert all(gradient is not None and gradient.abs().max() > 1e-9 for gradient in gradients.values())
    assert sum(gradient.numel() for gradient in gradients.values()) == count_adapters(
        policy.config, make_config().lora
    )


@pytest.mark.parametrize("name", EXPERTS)
def test_an_expert_s_matrix_gets_its_own_pair(name: str) -> None:
    policy = make_policy(name, targets=TENSORS, rslora=True)
    found, parameters = FullTensors(policy), dict(policy.named_parameters())
    assert len(adapted(policy)) >= 6
    for path in adapted(policy):
        a, b = (parameters[f"{prefix_of(path)}lora_{part}.weight"] for part in "AB")
        for expert, base in enumerate(parameters[path]):
            pair = b[:, expert::8] @ a[4 * expert : 4 * expert + 4]
            wanted = base + 3.0 * (pair.T if name == "gpt-oss-20b" else pair)  # alpha 6 / sqrt(4)
            assert (found[path][expert] - wanted).abs().max() < 1e-14


@pytest.mark.parametrize(
    "name", families(["Qwen3-30B-A3B", "gpt-oss-20b", "GLM-4.5-Air"], usual=["gpt-oss-20b"])
)
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "experts.down_proj")], ids=" ".join)
def test_a_saved_adapter_is_merged_and_trained_on(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    policy = make_policy(name, targets=targets)
    reference(name).save_pretrained(tmp_path / "base")
    config = make_config(targets=targets)
    save_adapter(tmp_path / "adapter", policy.config, config.lora, trained(policy), "base", None)
    expected = FullTensors(policy)
    found = load_model(tmp_path / "base", adapter=tmp_path / "adapter").tensors
    assert found.keys() == expected.keys()
    for path, tensor in found.items():
        assert torch.allclose(tensor, expected[path], atol=1e-6), path  # adapters are read in float32
    lazy = open_model(tmp_path / "base", adapter=tmp_path / "adapter").tensors
    assert isinstance(lazy, AdaptedTensors)
    path = "model.layers.1.mlp.experts.down_proj"
    assert torch.allclose(lazy.rows(path, slice(2, 5)), found[path][2:5], rtol=0, atol=1e-12), (
        "a rank's slice"
    )
    paths = {"path": tmp_path / "base", "adapter": tmp_path / "adapter"}
    config = config.model_copy(update={"model": config.model.model_copy(update=paths)})
    adapter = open_start(config, torch.float64).adapter
    assert adapter is not None
    start = trained(policy)
    assert adapter.tensors.keys() == start.keys()
    assert all(torch.equal(tensor, start[path].float()) for path, tensor in adapter.tensors.items())


@pytest.mark.parametrize(
    ("name", "has_attention"),
    cases(
        product(["Qwen3-30B-A3B", "Mixtral-8x7B", "GLM-4.5-Air"], [True, False]),
        usual=[("Mixtral-8x7B", True), ("Qwen3-30B-A3B", False)],
    ),
)
def test_an_adapter_of_single_experts_is_merged_as_transformers_4_named_them(
    name: str, has_attention: bool, tmp_path: Path
) -> None:
    save_single(name, has_attention, tmp_path)
    stored = read_safetensors(tmp_path / "base")
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    for path in {path.partition(".lora_")[0] for path in adapter}:
        b, a = (adapter[f"{path}.lora_{part}.weight"].double() for part in "BA")
        stored[f"{path.removeprefix(PREFIX)}.weight"] += 1.5 * b @ a
    (tmp_path / "merged").mkdir()
    save_file(stored, tmp_path / "merged/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "merged/config.json").write_bytes((tmp_path / "base/config.json").read_bytes())
    wanted = load_model(tmp_path / "merged").tensors
    found = load_model(tmp_path / "base", adapter=tmp_path / "adapter").tensors
    assert all(torch.allclose(tensor, wanted[path], rtol=0, atol=1e-12) for path, tensor in found.items())
    paths = {"path": tmp_path / "base", "adapter": tmp_path / "adapter"}
    config = make_config()
    config = config.model_copy(update={"model": config.model.model_copy(update=paths)})
    with refused(
        "adapter adapts single experts, which are trained in one tensor; train the whole .* lora.rank 0"
    ):
        open_start(config, torch.float64)
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = {path.replace("experts.7", "experts.8"): tensor for path, tensor in load_file(file).items()}
    save_file(tensors, file)
    with refused(r"experts\.8\..* is none of an adapter of the model; give an adapter of this model"):
        load_model(tmp_path / "base", adapter=tmp_path / "adapter")


def save_single(name: str, has_attention: bool, folder: Path) -> None:
    """base/ and adapter/: of rank 4 on all of the base's experts, one matrix at a time."""
    reference(name).save_pretrained(folder / "base")
    (folder / "adapter").mkdir()
    generator, tensors = torch.Generator().manual_seed(4), {}
    for path, tensor in read_safetensors(folder / "base").items():
        if ".experts." in path or (has_attention and "q_proj.weight" in path):
            sides = ("A", (4, tensor.shape[1])), ("B", (tensor.shape[0], 4))
            for part, shape in sides:
                key = f"{PREFIX}{path.removesuffix('.weight')}.lora_{part}.weight"
                tensors[key] = 0.1 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter/adapter_model.safetensors")
    kinds = {path.partition(".lora_")[0].rpartition(".")[2] for path in tensors}
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": sorted(kinds)}
    (folder / "adapter/adapter_config.json").write_text(json.dumps(said))


def test_what_experts_have_no_name_for_is_refused_with_the_names_they_have() -> None:
    with pytest.raises(UserError) as caught:
        count_adapters(config_of("Qwen3-30B-A3B"), make_config(targets=("q_proj", "gate_proj")).lora)
    assert str(caught.value) == (
        "lora.targets: the model has no matrix 'gate_proj' to adapt; give some of q_proj, k_proj, v_proj, o_proj,"
        " experts.gate_up_proj, experts.down_proj"
    )
    with refused("lora.rank: 33 is more than the smaller side of experts.down_proj, 32; give at most 32"):
        count_adapters(config_of("Qwen3-30B-A3B"), make_config(rank=33, targets=("experts.down_proj",)).lora)


def test_the_plan_counts_the_sums_of_experts() -> None:
    shape = config_of("Qwen3-30B-A3B")
    for changes, layers in (({}, 4), ({"parallel.checkpoint_activations": True}, 1)):
        run = PlannedRun(make_config("float32"), shape, None, 1, False, None, 16).changed(changes)
        parts = {term.name: term.num_bytes for term in plan_memory(run).terms}
        sums = (layers + 1) * 4 * 8 * (64 * 64 + 32 * 64)  # and a layer's gradient
        assert sums <= parts["adapted weights"] < 1.2 * sums  # autograd keeps the adapters' parts beside it
    run = PlannedRun(make_config("float32", targets=ATTENTION), shape, None, 1, False, None, 16)
    parts = {term.name: term.num_bytes for term in plan_memory(run).terms}
    assert parts["adapted weights"] < 0.2 * 5 * 4 * 8 * (64 * 64 + 32 * 64)  # attention's sums alone

"""A run, and every command, can start from an adapter as PEFT saves it: merged into the model, or trained
on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.refused import refused
from tests.unit.models.test_lora import ALONE, LLAMA, are_equal, base_of, make_config, make_policy, trained
from tests.unit.models.test_lora import logits_of as logits_of_policy
from tlt.base.config.load import load_config
from tlt.base.config.lora import LoraSection
from tlt.base.config.schema import Config
from tlt.base.types import UserError
from tlt.engine.build.model import load_model, open_start
from tlt.models.decoder import Transformer
from tlt.models.hf.peft import read_adapter, save_adapter
from tlt.models.hf.weights import save_model
from tlt.models.lora import BaseOf
from tlt.training.build.policy import build_policy, build_policy_trainer, policy_on_meta
from tlt.training.ranks.sharding import FullTensors

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {name: tensor.detach() for name, tensor in base_of(LLAMA).state_dict().items()}
    save_model(tmp_path / "base", LLAMA, tensors, dtype=torch.float64, source=None, extra=IDS)
    save_adapter(tmp_path / "adapter", LLAMA, make_config().lora, trained(make_policy()), "base", None)
    return tmp_path


def start_from(saved: Path, **changes: Any) -> Config:
    config = make_config().model_copy(update=changes)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": saved / "base", "adapter": saved / "adapter"})
        }
    )


def published(config: Config, saved: Path) -> dict[str, Tensor]:
    model = open_start(config, torch.float64)
    policy = build_policy(policy_on_meta(config, model.config), model, torch.device("cpu"))
    return {name: tensor.detach() for name, tensor in FullTensors(policy, torch.float64).items()}


def test_merged_it_is_the_model_whose_adapters_were_saved(saved: Path) -> None:
    expected = {name: tensor.detach() for name, tensor in FullTensors(make_policy(), torch.float64).items()}
    found = load_model(saved / "base", adapter=saved / "adapter").tensors
    base = load_model(saved / "base").tensors
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name  # adapters are read in float32
    assert not torch.equal(
        found["model.layers.1.mlp.up_proj.weight"], base["model.layers.1.mlp.up_proj.weight"]
    )
    assert torch.equal(found["model.norm.weight"], base["model.norm.weight"])


def test_a_run_begins_with_the_merged_model_whatever_it_trains(saved: Path) -> None:
    merged = load_model(saved / "base", adapter=saved / "adapter").tensors
    for lora in (LoraSection(), make_config().lora):
        for name, tensor in published(start_from(saved, lora=lora), saved).items():
            assert torch.allclose(tensor, merged[name], atol=1e-12), name


def test_adapters_that_are_trained_on_are_those_of_the_folder(saved: Path) -> None:
    config = start_from(saved)
    trainer = build_policy_trainer(config, open_start(config, torch.float64), ALONE)
    start = {name: tensor.double() for name, tensor in read_adapter(saved / "adapter", LLAMA).tensors.items()}
    assert are_equal(trained(trainer.model), start)


def test_the_kl_is_to_where_the_run_starts_and_not_to_the_base(saved: Path) -> None:
    config = start_from(saved)
    config = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"kl_coefficient": 0.1})}
    )
    trainer = build_policy_trainer(config, open_start(config, torch.float64), ALONE)
    assert isinstance(trainer.reference, Transformer | BaseOf)
    assert torch.equal(logits_of_policy(trainer.reference), logits_of_policy(trainer.model))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 8}, "lora.rank: describes another adapter than model.adapter"),
        ({"alpha": 7.0}, "lora.alpha: describes another adapter"),
        ({"targets": ("q_proj",)}, "lora.targets: describes another adapter"),
    ],
)
def test_a_run_that_trains_other_adapters_is_refused(saved: Path, changes: dict[str, Any], said: str) -> None:
    with refused(said) as caught:
        open_start(start_from(saved, lora=make_config(**changes).lora), torch.float64)
    assert "train the whole policy with lora.rank 0" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("peft_type", "IA3", "peft_type 'IA3' is not read; give a plain LoRA adapter"),
        ("use_dora", True, "use_dora True is not read"),
        ("modules_to_save", ["lm_head"], "modules_to_save is not read"),
        ("alora_invocation_tokens", [7], "alora_invocation_tokens is not read"),
        ("init_lora_weights", "pissa_niter_4", "init_lora_weights 'pissa_niter_4' is not read"),
        ("r", None, "r, lora_alpha or use_rslora cannot be read"),
        ("target_modules", [1], "target_modules is [1]; it must be a text or a list of texts"),
        ("target_modules", {"q_proj": 1}, "target_modules is {'q_proj': 1}; it must be a text or a list"),
    ],
)
def test_what_is_no_plain_lora_is_refused_in_a_line(saved: Path, key: str, value: Any, said: str) -> None:
    file = saved / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError) as caught:
        read_adapter(saved / "adapter", LLAMA)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


PATHS = [f"model.layers.{layer}.{name}" for layer in range(LLAMA.num_layers) for name in
         ("self_attn.q_proj", "mlp.down_proj")]  # fmt: skip


def edit_adapter(saved: Path, keep: Callable[[str], bool] = lambda name: True, **said: Any) -> Path:
    folder = saved / "adapter"
    file, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    save_file({name: tensor for name, tensor in load_file(weights).items() if keep(name)}, weights)
    return folder


@pytest.mark.parametrize(
    "said",
    [
        "all-linear",
        "q_proj",
        r".*\.(q|k|v|o|gate|up|down)_proj",
        r".*\.layers\.\d+\..*",
        None,
        PATHS,
        [],
        ["*"],
    ],
    ids=str,
)
def test_the_tensors_say_what_is_adapted_however_peft_was_told(saved: Path, said: Any) -> None:
    before = load_model(saved / "base", adapter=saved / "adapter").tensors
    targets = read_adapter(saved / "adapter", LLAMA).lora.targets
    folder = edit_adapter(saved, target_modules=said)
    assert read_adapter(folder, LLAMA).lora.targets == targets
    assert are_equal(load_model(saved / "base", adapter=folder).tensors, before)
    assert open_start(start_from(saved), torch.float64).adapter is not None


@pytest.mark.parametrize(
    "said",
    [
        {"target_modules": r".*\.layers\.1\..*_proj"},
        {"target_modules": ["model.layers.1.self_attn.q_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    ],
    ids=["a pattern", "paths", "layers"],
)
def test_matrices_that_an_adapter_leaves_out_are_the_bases(saved: Path, said: dict[str, Any]) -> None:
    whole = load_model(saved / "base", adapter=saved / "adapter").tensors
    folder = edit_adapter(saved, lambda name: "layers.1." in name, **said)
    found, base = load_model(saved / "base", adapter=folder).tensors, load_model(saved / "base").tensors
    for name, tensor in found.items():
        assert torch.equal(tensor, (whole if "layers.1." in name else base)[name])
    with refused(r"does not adapt model\.layers\.0\..*lora\.rank 0"):
        open_start(start_from(saved), torch.float64)
    assert open_start(start_from(saved, lora=LoraSection()), torch.float64)


def test_a_matrix_that_is_missing_without_a_pattern_is_refused(saved: Path) -> None:
    folder = edit_adapter(saved, lambda name: "layers.1." in name)
    with refused(r"layers\.0\..* is missing; give an adapter of this model"):
        read_adapter(folder, LLAMA)
    folder = edit_adapter(saved, lambda name: False)
    with refused("holds no matrix of LoRA"):
        read_adapter(folder, LLAMA)


def test_an_adapter_of_another_model_is_refused_by_its_tensor(saved: Path) -> None:
    for shape, said in (
        (replace(LLAMA, num_layers=3), r"model.layers.2.*is missing; give an adapter of this model"),
        (replace(LLAMA, num_layers=1), r"model.layers.1.*is none of an adapter of the model"),
        (replace(LLAMA, intermediate_size=40), r"has shape .* where the model needs"),
    ):
        with refused(said):
            read_adapter(saved / "adapter", shape)
    file = saved / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[min(tensors)][0, 0] = float("nan")
    save_file(tensors, file)
    with refused("holds NaN or infinite values"):
        read_adapter(saved / "adapter", LLAMA)
    file.write_bytes(b"?")
    with refused("is no readable safetensors file"):
        read_adapter(saved / "adapter", LLAMA)


def test_the_path_is_taken_from_the_configurations_folder_and_a_missing_one_refused(saved: Path) -> None:
    config = '[model]\npath = "base"\nadapter = "{}"\n[task]\nname = "countdown"\n'
    (saved / "run.toml").write_text(config.format("adapter"))
    assert load_config(saved / "run.toml").model.adapter == saved / "adapter"
    (saved / "run.toml").write_text(config.format("./no/such/adapter"))
    with refused(r"model.adapter is .*no/such/adapter; there is no such folder"):
        load_config(saved / "run.toml")

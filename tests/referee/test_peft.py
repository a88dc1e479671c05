"""Our LoRA is PEFT's: an adapter saved here and loaded by PEFT beside transformers' model gives the same
logits, gradients and merged matrices, and has as many parameters. Runs where PEFT is installed: pip
install peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.test_lora import make_config
from tests.unit.models.transformer_parts import PROMPTS, packed_logits, referee, trainable
from tlt.base.config.lora import LoraSection
from tlt.engine.build.model import Model
from tlt.models.decoder import Transformer
from tlt.models.hf.peft import PREFIX, save_adapter
from tlt.models.lora import count_adapters
from tlt.training.build.policy import build_policy, policy_on_meta
from tlt.training.ranks.sharding import FullTensors

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")

LORAS: dict[str, dict[str, Any]] = {
    "all": {"rank": 4, "alpha": 6.0},
    "two, rslora": {"rank": 8, "alpha": 16.0, "rslora": True, "targets": ("q_proj", "down_proj")},
}
CASES = [
    ("llama-gqa2-rope3", "all"),
    ("llama-gqa4-tied", "two, rslora"),
    ("qwen2-gqa2", "two, rslora"),
    ("qwen2-tied", "all"),
    ("qwen3-gqa4", "all"),
    ("qwen3-tied", "two, rslora"),
]


def make_pair(
    case: str, dtype: torch.dtype, lora: dict[str, Any], folder: Path
) -> tuple[Transformer, Any, LoraSection]:
    """Our policy with random adapters, and PEFT's, which reads them from a folder that we have written."""
    theirs = referee(case, dtype)
    base, config = trainable(theirs), make_config(str(dtype).removeprefix("torch."), **lora)
    model = Model(
        Path(), base.config, None, (), {name: tensor.detach() for name, tensor in base.state_dict().items()}
    )
    ours = build_policy(policy_on_meta(config, base.config), model, torch.device("cpu"), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapters = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    save_adapter(folder / "adapter", base.config, config.lora, adapters, "base", None)
    return ours, peft.PeftModel.from_pretrained(theirs, folder / "adapter", is_trainable=True), config.lora


def their_logits(theirs: Any) -> Tensor:
    return torch.cat([theirs(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])


def weighted(logits: Tensor) -> Tensor:
    """A loss: how probable some tokens are, each with another weight."""
    weights = torch.linspace(-1, 2, len(logits), dtype=logits.dtype)
    return (logits.log_softmax(-1)[:, 7] * weights).mean()


@pytest.mark.parametrize(("case", "lora"), CASES)
def test_logits_gradients_and_merged_matrices_are_pefts(case: str, lora: str, tmp_path: Path) -> None:
    ours, theirs, section = make_pair(case, torch.float64, LORAS[lora], tmp_path)
    expected, found = their_logits(theirs), packed_logits(ours, PROMPTS)
    assert (found - expected).abs().max() < 1e-10
    with theirs.disable_adapter():
        assert (their_logits(theirs) - expected).abs().max() > 1e-2, "adapters do something"
    weighted(expected).backward()
    weighted(found).backward()
    gradients = {
        name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad
    }
    mine = {PREFIX + name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert mine.keys() == gradients.keys()
    assert all((mine[name] - gradient).abs().max() < 1e-10 for name, gradient in gradients.items())
    assert all(gradient.abs().max() > 1e-6 for gradient in gradients.values())
    assert count_adapters(ours.config, section) == theirs.get_nb_trainable_parameters()[0]
    merged, published = dict(theirs.merge_and_unload().named_parameters()), FullTensors(ours)
    assert merged.keys() == published.keys()
    assert all((published[name] - tensor).abs().max() < 1e-14 for name, tensor in merged.items())


@pytest.mark.parametrize("case", ["llama-gqa2-rope3", "qwen2-tied", "qwen3-gqa4"])
def test_logits_are_pefts_in_float32(case: str, tmp_path: Path) -> None:
    ours, theirs, _ = make_pair(case, torch.float32, LORAS["all"], tmp_path)
    with torch.no_grad():
        assert (packed_logits(ours, PROMPTS) - their_logits(theirs)).abs().max() < 1e-5


def test_the_saved_configuration_is_one_of_pefts_with_nothing_unknown_in_it(tmp_path: Path) -> None:
    _, theirs, section = make_pair("qwen2-tied", torch.float32, LORAS["two, rslora"], tmp_path)
    config = theirs.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (section.rank, section.alpha, True)
    assert config.target_modules == set(section.targets)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said.keys() <= config.to_dict().keys()

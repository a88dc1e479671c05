"""Adapters of experts and of text parts: saved here, loaded by PEFT beside transformers' model, and the other
way round. Runs where PEFT is installed: pip install peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.families import VOCAB, reference
from tests.unit.models.test_lora import make_config, trained
from tests.unit.models.test_lora_experts import (
    ATTENTION,
    EXPERTS,
    TENSORS,
    logits_of,
    make_policy,
    save_single,
)
from tests.unit.models.test_text_part import WHOLE, adapted_policy
from tests.unit.models.test_text_part import reference as whole_model
from tlt.engine.build.model import load_model
from tlt.models.hf.peft import PREFIX, peft_names, save_adapter
from tlt.training.ranks.sharding import FullTensors

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")

LORAS: dict[str, dict[str, Any]] = {
    "all": {},
    "one of the experts' two, rslora": {"targets": ("v_proj", "experts.down_proj"), "rslora": True},
    "experts alone": {"targets": TENSORS},
}


def base_of(name: str, folder: Path) -> Any:
    """A copy, which PEFT may change."""
    reference(name).save_pretrained(folder)
    model = type(reference(name)).from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation=reference(name).config._attn_implementation,
        experts_implementation="eager",
    )
    return model.eval()


def their_logits(theirs: Any) -> Tensor:
    tokens = torch.randint(4, VOCAB, (42,), generator=torch.Generator().manual_seed(0))
    return torch.cat(
        [theirs(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split([30, 12])]
    )


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("lora", LORAS)
def test_peft_computes_what_we_do_with_the_adapter_that_we_save(name: str, lora: str, tmp_path: Path) -> None:
    policy, section = make_policy(name, **LORAS[lora]), make_config(**LORAS[lora]).lora
    save_adapter(tmp_path / "adapter", policy.config, section, trained(policy), "base", None)
    base = base_of(name, tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    expected, found = their_logits(theirs), logits_of(policy)
    rounds = name in ("gpt-oss-20b", "GLM-4.5-Air")  # its attention, its router to float32
    tolerance = 1e-6 if rounds else 1e-10
    assert (found - expected).abs().max() < tolerance
    with theirs.disable_adapter():
        assert (their_logits(theirs) - expected).abs().max() > 1e-2, "adapters do something"
    for logits in (expected, found):
        (logits.log_softmax(-1)[:, 7] * torch.linspace(-1, 2, 42)).mean().backward()
    gradients = {
        path.replace(".default", ""): p.grad for path, p in theirs.named_parameters() if p.requires_grad
    }
    names = peft_names(path for path, p in policy.named_parameters() if p.requires_grad)
    mine = {PREFIX + names[path]: p.grad for path, p in policy.named_parameters() if p.requires_grad}
    assert mine.keys() == gradients.keys()
    assert all((mine[path] - gradient).abs().max() < tolerance for path, gradient in gradients.items())
    merged = dict(theirs.merge_and_unload().named_parameters())
    for path, tensor in FullTensors(policy).items():
        if path in merged:  # buffers, such as a router's correction, are none
            assert (tensor - merged[path]).abs().max() < 1e-13


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize(
    "said",
    [
        {"target_modules": [*ATTENTION], "target_parameters": [*TENSORS]},
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
        {"target_modules": ["q_proj"], "target_parameters": ["down_proj"]},
    ],
    ids=str,
)
def test_an_adapter_of_pefts_is_merged_as_peft_merges_it(
    name: str, said: dict[str, Any], tmp_path: Path
) -> None:
    base = base_of(name, tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=9, task_type="CAUSAL_LM", **said))
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload().state_dict()
    found = load_model(tmp_path / "base", adapter=tmp_path / "adapter").tensors
    for path, tensor in found.items():
        torch.testing.assert_close(tensor, merged[path].to(tensor.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Mixtral-8x7B"])
def test_an_adapter_of_single_experts_is_merged_as_peft_merges_it(name: str, tmp_path: Path) -> None:
    save_single(name, True, tmp_path)
    found = load_model(tmp_path / "base", adapter=tmp_path / "adapter").tensors
    theirs = peft.PeftModel.from_pretrained(base_of(name, tmp_path / "base"), tmp_path / "adapter")
    merged = theirs.merge_and_unload().state_dict()
    for path, tensor in found.items():
        torch.testing.assert_close(tensor, merged[path], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", WHOLE)
def test_peft_reads_an_adapter_of_a_text_part_beside_the_whole_model(name: str, tmp_path: Path) -> None:
    whole_model(name).save_pretrained(tmp_path / "base")
    policy, config = adapted_policy(tmp_path / "base", "transformers")
    save_adapter(tmp_path / "adapter", policy.config, config.lora, trained(policy), "base", None)
    base = type(whole_model(name)).from_pretrained(tmp_path / "base", dtype=torch.float64)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert (logits_of(policy) - their_logits(theirs)).abs().max() < 1e-9
        with theirs.disable_adapter():
            assert (logits_of(policy) - their_logits(theirs)).abs().max() > 1e-2
    assert not [path for path, _ in theirs.named_parameters() if "lora_" in path and "vis" in path]

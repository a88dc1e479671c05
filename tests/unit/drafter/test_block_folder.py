"""Folders of block drafters: z-lab's form, with what silently goes wrong in it checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.helpers import VOCAB
from tests.unit.drafter.block_parts import DEEP, FORMS, NUM_DRAFTED, POLICY, make_block
from tlt.drafter.formats.export import Target, check_format
from tlt.drafter.formats.folder import StoredDrafter, choose_preset, load_drafter, load_shape, save_drafter
from tlt.drafter.shape import Method
from tlt.types import UserError
from tlt.vllm.drafter import export_for_vllm

forms = pytest.mark.parametrize(("method", "draft_vocab"), FORMS)


@forms
def test_a_folder_gives_back_the_shape_and_every_tensor(
    method: Method, draft_vocab: int | None, tmp_path: Path
) -> None:
    model = make_block(method, draft_vocab)
    save_drafter(tmp_path, model, torch.float64, {"preset": method})
    stored = load_drafter(tmp_path, DEEP, dict(POLICY.named_parameters()))
    assert stored.config == load_shape(tmp_path, DEEP) == model.config
    assert stored.tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.tensors.items())
    assert choose_preset(None, stored).method == method
    with pytest.raises(UserError, match=f"eagle3 does not train a drafter of form {method}"):
        choose_preset("eagle3", stored)


def test_config_json_has_the_keys_that_z_lab_writes(tmp_path: Path) -> None:
    save_drafter(tmp_path, make_block("dflash"), torch.bfloat16)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["architectures"] == ["DFlashDraftModel"]
    assert described["model_type"] == "qwen3"
    assert described["num_hidden_layers"] == 2
    assert described["block_size"] == NUM_DRAFTED + 1
    assert described["num_target_layers"] == 6
    assert described["layer_types"] == ["full_attention"] * 2
    assert described["tie_word_embeddings"] is False
    # ids of outputs: layer 1's output is the input of layer 2
    assert described["dflash_config"] == {"mask_token_id": 13, "target_layer_ids": [1, 3]}
    assert make_block("dflash").config.capture == (2, 4)
    save_drafter(tmp_path, make_block("dspark", VOCAB - 3), torch.bfloat16)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["architectures"] == ["Qwen3DSparkModel"]
    assert described["block_size"] == NUM_DRAFTED
    names = ("markov_rank", "enable_confidence_head", "confidence_head_with_markov", "draft_vocab_size")
    assert [described[name] for name in names] == [16, True, True, VOCAB - 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": None}, "block_size is None; it must be a number from 2 to 33"),
        ({"block_size": 34}, "block_size is 34"),
        ({"dflash_config": {"mask_token_id": 61, "target_layer_ids": [1, 3]}}, "mask_token_id is 61"),
        ({"dflash_config": {"mask_token_id": 13}}, "target_layer_ids is None; it must name layers, rising"),
        ({"dflash_config": {"mask_token_id": 13, "target_layer_ids": [3, 1]}}, "must name layers, rising"),
        ({"dflash_config": {"mask_token_id": 13, "target_layer_ids": [1, 6]}}, "a number from 0 to 5"),
        ({"dflash_config": {"mask_token_id": 13, "target_layer_ids": [1, 3, 5]}}, "tensor fc.weight is"),
        ({"num_hidden_layers": 1}, "tensor layers.1"),
        ({"confidence_head_with_markov": False}, "confidence_head_with_markov is not True"),
        ({"hidden_size": 16}, "hidden_size is 16, the target's is 32"),
    ],
)
def test_what_cannot_be_right_is_refused_in_a_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_drafter(tmp_path, make_block("dspark"), torch.float64)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError) as error:
        load_drafter(tmp_path, DEEP)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_does_not_take_block_drafters_yet_says_so_in_a_line(tmp_path: Path) -> None:
    model = make_block("dspark")
    stored = StoredDrafter(model.config, model.state_dict(), {})
    head_VE = POLICY.model.embed_tokens.weight
    with pytest.raises(UserError, match="engine vllm has no drafter of form dspark yet; give engine tlt"):
        export_for_vllm(stored, Target("m", "LlamaForCausalLM", head_VE), tmp_path)
    with pytest.raises(UserError, match="vllm-eagle3 is for eagle3 drafters, this one is dspark; no other"):
        check_format(stored, "vllm-eagle3")

"""Folders of block drafters in z-lab's, DeepSpec's and speculators' forms, and what silently goes wrong in
them: one test each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lossless.helpers import VOCAB
from tests.refused import refused
from tests.unit.drafter.block_parts import DEEP, FORMS, NUM_DRAFTED, POLICY, SIZE, make_block
from tlt.base.types import UserError
from tlt.drafter.formats.export import (
    FORMATS,
    export_drafter,
    lacks_counts,
    unequal_key_norms,
    with_vocabulary,
)
from tlt.drafter.formats.folder import StoredDrafter, choose_preset, load_drafter, load_shape, save_drafter
from tlt.drafter.formats.layouts import DescribedTarget
from tlt.drafter.shape import BlockShape, Method

EMBEDDING_VE = POLICY.model.embed_tokens.weight.detach()

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
    with refused(f"eagle3 does not train a drafter of form {method}"):
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
    assert (described["mask_token_id"], described["target_layer_ids"]) == (13, [1, 3])
    names = ("markov_rank", "enable_confidence_head", "draft_vocab_size")
    assert [described[name] for name in names] == [16, False, VOCAB - 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": None}, "block_size is None; it must be a number from 2 to 33"),
        ({"block_size": 34}, "block_size is 34"),
        ({"dflash_config": {"mask_token_id": 61, "target_layer_ids": [1, 3]}}, "mask_token_id is 61"),
        ({"target_layer_ids": None}, "target_layer_ids is None; it must name layers, rising"),
        (
            {"dflash_config": {"mask_token_id": 13, "target_layer_ids": [3, 1]}},
            "must name layers from -1 to 4, rising",
        ),
        (
            {"dflash_config": {"mask_token_id": 13, "target_layer_ids": [1, 5]}},
            "must name layers from -1 to 4, rising",
        ),
        ({"dflash_config": {"mask_token_id": 13, "target_layer_ids": [1, 3, 4]}}, "tensor fc.weight is"),
        ({"num_hidden_layers": 1}, "tensor layers.1"),
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


# ── other engines' and trainers' forms ──────────────────────────────────────────────────────────────────────


def stored(method: Method, draft_vocab: int | None = None) -> StoredDrafter:
    model = make_block(method, draft_vocab)
    return StoredDrafter(model.config, dict(model.state_dict()), {"preset": method})


def exported(folder: Path, name: str, draft_vocab: int | None = None) -> StoredDrafter:
    """Writes a drafter with random norms and heads in this format."""
    drafter = stored(FORMATS[name].method, draft_vocab)
    target = DescribedTarget("org/model", "LlamaForCausalLM", EMBEDDING_VE, embedding_VE=EMBEDDING_VE)
    export_drafter(drafter, name, target, folder)
    return drafter


def edit(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "config.json"
    described = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}
    path.write_text(json.dumps(described))
    return folder


def test_layer_ids_count_outputs_in_two_forms_and_inputs_in_the_third(tmp_path: Path) -> None:
    """One layer off, a drafter loads everywhere and drafts worse."""
    ids = {}
    for name in ("vllm-dflash", "speculators-dflash", "deepspec-dspark"):
        assert exported(tmp_path / name, name).config.capture == (2, 4)
        described = json.loads((tmp_path / name / "config.json").read_text())
        nested = described.get("dflash_config", described)
        ids[name] = nested.get("target_layer_ids", nested.get("aux_hidden_state_layer_ids"))
    assert ids == {"vllm-dflash": [1, 3], "speculators-dflash": [2, 4], "deepspec-dspark": [1, 3]}
    edit(tmp_path / "speculators-dflash", {"aux_hidden_state_layer_ids": [0, 5]})
    assert load_shape(tmp_path / "speculators-dflash", DEEP).capture == (0, 5)
    edit(tmp_path / "deepspec-dspark", {"target_layer_ids": [-1, 4]})
    assert load_shape(tmp_path / "deepspec-dspark", DEEP).capture == (0, 5)
    for ids_given in ([-1, 4], [2, 6]):  # engines differ in whether the last layer's output is normed
        edit(tmp_path / "speculators-dflash", {"aux_hidden_state_layer_ids": ids_given})
        with refused(r"ids is .*; it must name layers from 0 to 5, rising"):
            load_shape(tmp_path / "speculators-dflash", DEEP)


def test_the_anchor_s_layout_makes_the_form_whatever_the_folder_is_called(tmp_path: Path) -> None:
    for name, form in (("speculators-dflash", "dflash"), ("speculators-dspark", "dspark")):
        exported(tmp_path / name, name)
        assert load_shape(tmp_path / name, DEEP).method == form
    # a DFlash that drafts from its anchor is a DSpark without heads, and drafts one token more
    drafting = load_shape(edit(tmp_path / "speculators-dflash", {"sample_from_anchor": True}), DEEP)
    assert isinstance(drafting, BlockShape)
    assert (drafting.method, drafting.markov_rank) == ("dspark", 0)
    assert drafting.max_depth == NUM_DRAFTED + 1
    # without the key vLLM has the anchor draft nothing, which no Markov head of ours does
    for absent in (None, False):
        folder = edit(tmp_path / "speculators-dspark", {"sample_from_anchor": absent})
        with refused(f"sample_from_anchor is {absent}; it has a Markov head"):
            load_shape(folder, DEEP)
    exported(tmp_path / "deepspec", "deepspec-dspark")
    assert load_shape(tmp_path / "deepspec", DEEP).method == "dspark"
    with refused("set sample_from_anchor to true"):
        load_shape(edit(tmp_path / "deepspec", {"dspark_bonus_anchor": True}), DEEP)


def test_a_confidence_head_is_known_left_out_and_told(tmp_path: Path) -> None:
    """vLLM's and DeepSpec's weights have one; it reads the Markov head's states, or does not."""
    for name, num_read in (("deepspec-dspark", SIZE + 16), ("speculators-dspark", SIZE)):
        drafter = exported(tmp_path / name, name)
        tensors = load_file(tmp_path / name / "model.safetensors")
        head = {
            "confidence_head.proj.weight": torch.ones(1, num_read),
            "confidence_head.proj.bias": torch.ones(1),
        }
        save_file({**tensors, **head}, tmp_path / name / "model.safetensors")
        edit(
            tmp_path / name, {"enable_confidence_head": True, "confidence_head_with_markov": num_read > SIZE}
        )
        found = load_drafter(tmp_path / name, DEEP, dict(POLICY.named_parameters()))
        assert found.config == drafter.config == load_shape(tmp_path / name, DEEP)
        assert found.tensors.keys() == drafter.tensors.keys()
        assert found.note is not None
        assert found.note.startswith(
            "confidence_head.proj.bias, confidence_head.proj.weight of the drafter left out"
        )
        assert drafter.note is None


def test_a_key_in_dflash_config_goes_before_one_beside_it(tmp_path: Path) -> None:
    """All engines read mask and block size so."""
    exported(tmp_path / "out", "vllm-dflash")
    nested = {"mask_token_id": 9, "target_layer_ids": [1, 3], "block_size": 3}
    found = load_shape(edit(tmp_path / "out", {"mask_token_id": 8, "dflash_config": nested}), DEEP)
    assert isinstance(found, BlockShape)
    assert (found.mask_token_id, found.block_size) == (9, 3)


def test_a_block_is_not_causal_for_vllm_s_reading_of_speculators(tmp_path: Path) -> None:
    """Where the key is false, vLLM 0.32 hides a block's later slots from its earlier ones."""
    exported(tmp_path / "out", "speculators-dflash")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["sliding_window_non_causal"] is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_causal": True}, "is_causal is True"),
        ({"is_neox_style": False}, "is_neox_style is False"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is ['full_attention', 'sliding_attention']",
        ),
        ({"num_target_layers": 7}, "num_target_layers is 7; this model has 6"),
        ({"dflash_config": {"causal": True}}, "causal is True"),
        ({"dflash_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"dflash_config": {"attention_value_scale": 2.0}}, "attention_value_scale is 2.0"),
        ({"dflash_config": {"input_embedding_scale": 8.0}}, "input_embedding_scale is 8.0"),
        ({"projector_type": "domino"}, "projector_type is 'domino'"),
        ({"shift_label": True}, "shift_label is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures is ['DFlash2DraftModel']"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_in_a_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    exported(tmp_path / "out", "vllm-dflash")
    ids = {"mask_token_id": 13, "target_layer_ids": [1, 3]}
    if "dflash_config" in changes:
        changes = {"dflash_config": ids | changes["dflash_config"]}
    with pytest.raises(UserError) as error:
        load_drafter(edit(tmp_path / "out", changes), DEEP)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_masks_with_an_embedding_of_their_own_are_refused(tmp_path: Path) -> None:
    exported(tmp_path / "out", "vllm-dflash")
    (tmp_path / "out" / "mask_embedding.pt").touch()
    with refused(r"mask_embedding\.pt gives the masks an embedding of their own"):
        load_drafter(tmp_path / "out", DEEP)


def test_other_markov_heads_are_refused_and_a_trainer_s_own_tensors_are_not(tmp_path: Path) -> None:
    exported(tmp_path / "out", "speculators-dspark")
    weights = tmp_path / "out" / "model.safetensors"
    save_file(load_file(weights) | {"verifier_norm.weight": torch.ones(DEEP.hidden_size)}, weights)
    assert load_drafter(tmp_path / "out", DEEP).config == stored("dspark").config
    with refused("markov_head_type is 'gated'"):
        load_drafter(edit(tmp_path / "out", {"markov_head_type": "gated"}), DEEP)


def test_a_copy_of_the_target_s_head_is_dropped_and_another_head_stays(tmp_path: Path) -> None:
    target = DescribedTarget("m", "LlamaForCausalLM", EMBEDDING_VE)
    for name, head_VE, owns in (("same", EMBEDDING_VE, False), ("other", EMBEDDING_VE + 1, True)):
        exported(tmp_path / name, "vllm-dflash")
        weights = tmp_path / name / "model.safetensors"
        save_file(load_file(weights) | {"lm_head.weight": head_VE.contiguous()}, weights)
        found = load_drafter(tmp_path / name, DEEP, dict(POLICY.named_parameters()))
        assert found.config.owns_head is owns
        if owns:
            with refused("sglang-dflash has no place for the head"):
                export_drafter(found, "sglang-dflash", target, tmp_path / "x")
        export_drafter(found, "vllm-dflash", target, tmp_path / f"{name}-again")
        assert ("lm_head.weight" in load_file(tmp_path / f"{name}-again" / "model.safetensors")) is owns


def test_a_chosen_vocabulary_takes_the_rows_of_the_markov_head_along(tmp_path: Path) -> None:
    drafter = replace(stored("dspark"), counts_V=torch.arange(VOCAB).float())
    assert lacks_counts(drafter, "speculators-dspark", 20, DEEP) is None
    chosen = with_vocabulary(drafter, "speculators-dspark", 20, DEEP)
    rows_VR = drafter.tensors["markov_head.markov_w2.weight"][VOCAB - 20 :]
    assert torch.equal(chosen.tensors["markov_head.markov_w2.weight"], rows_VR)
    target = DescribedTarget("m", "LlamaForCausalLM", EMBEDDING_VE)
    export_drafter(chosen, "speculators-dspark", target, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], EMBEDDING_VE[VOCAB - 20 :])
    assert load_drafter(tmp_path / "out", DEEP).config.draft_vocab_size == 20
    with refused("20 has no place in deepspec-dspark"):
        with_vocabulary(drafter, "deepspec-dspark", 20, DEEP)


def test_an_export_for_vllm_says_that_its_cpu_builds_read_one_k_norm_for_all_layers() -> None:
    drafter = stored("dflash")
    assert "use tlt serve" in str(unequal_key_norms(drafter, "vllm-dflash"))
    assert unequal_key_norms(drafter, "sglang-dflash") is None
    norm = "layers.{}.self_attn.k_norm.weight"
    drafter.tensors[norm.format(1)] = drafter.tensors[norm.format(0)]
    assert unequal_key_norms(drafter, "vllm-dflash") is None


def test_a_dspark_without_a_markov_head_goes_to_no_engine_that_reads_one(tmp_path: Path) -> None:
    exported(tmp_path / "out", "speculators-dflash")
    found = load_drafter(edit(tmp_path / "out", {"sample_from_anchor": True}), DEEP)
    with refused("needs the Markov head that this drafter lacks"):
        export_drafter(found, "speculators-dspark", DescribedTarget("m", "x", EMBEDDING_VE), tmp_path / "x")

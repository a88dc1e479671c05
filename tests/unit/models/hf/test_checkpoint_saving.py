"""Saving: what we write transformers loads, whole or not at all; and the content hash by which a policy is
known."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.unit.models.hf.checkpoint_parts import hash_of, load_published_small, refusal, save_small, theirs
from tlt.base.io import files
from tlt.models.decoder import Transformer
from tlt.models.hf import weights as checkpoint
from tlt.models.hf.families import load_model_config
from tlt.models.hf.weights import content_hash, load_tensors, plan_shards, save_model


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 9_000])
def test_what_we_save_transformers_loads(case: str, max_shard_bytes: int, tmp_path: Path) -> None:
    model = theirs(case)
    model.save_pretrained(tmp_path / "source")
    config = load_model_config(tmp_path / "source")
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    target = tmp_path / "deep" / "target"
    save_model(
        target,
        config,
        tensors,
        dtype=torch.float32,
        source=tmp_path / "source",
        max_shard_bytes=max_shard_bytes,
    )

    assert load_model_config(target) == config
    assert content_hash(load_tensors(target, config)) == content_hash(tensors)
    shards = list(target.glob("*.safetensors"))
    assert (len(shards) > 2) == (max_shard_bytes == 9_000)
    if len(shards) > 1:
        total = json.loads((target / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
        assert total == sum(tensor.nbytes for tensor in tensors.values())
    for shard in shards:
        with safe_open(shard, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers 4 asks for it, 5 no longer does
    loaded, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.dtype == torch.float32
    assert loaded.config.eos_token_id == 7
    assert loaded.config.bos_token_id == model.config.bos_token_id
    token_ids = torch.tensor([[5, 9, 60, 0, 33]])
    with torch.no_grad():
        assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def test_a_model_saved_as_bfloat16_loads_as_bfloat16(tmp_path: Path) -> None:
    config = load_published_small()
    tensors = dict(Transformer(config).initialize(0).named_parameters())
    save_model(
        tmp_path / "target", config, tensors, dtype=torch.bfloat16, source=None, extra={"eos_token_id": 3}
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert (model.dtype, model.config.eos_token_id, model.config.bos_token_id) == (torch.bfloat16, 3, None)
    loaded = load_tensors(tmp_path / "target", config)
    assert all(torch.equal(loaded[name], tensors[name].detach().bfloat16()) for name in tensors)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_json_keeps_what_was_there_and_changes_what_has_changed(
    saved: Path, key: str, tmp_path: Path
) -> None:
    file = saved / "config.json"
    before = {k: v for k, v in json.loads(file.read_text()).items() if k not in ("dtype", "torch_dtype")}
    before |= {
        "initializer_range": 0.013,
        "attention_dropout": 0.1,
        "use_cache": False,
        "max_window_layers": 2,
        "somebody's own": {"deep": [1, None]},
        "bos_token_id": None,
        key: "float64",
    }
    file.write_text(json.dumps(before | {"tlt_checkpoint": "an earlier run's"}))
    config = load_model_config(saved)
    tensors = load_tensors(saved, config)
    save_model(tmp_path / "a", config, tensors, dtype=torch.bfloat16, source=saved, extra={"tlt_step": 3})
    written = json.loads((tmp_path / "a" / "config.json").read_text())
    assert written == before | {key: "bfloat16", "tlt_step": 3}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "a").dtype == torch.bfloat16


def test_a_config_json_of_another_shape_is_written_anew(saved: Path, tmp_path: Path) -> None:
    described = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 7, "mine": 1}))
    save_small(tmp_path / "target", source=saved)
    written = json.loads((tmp_path / "target" / "config.json").read_text())
    assert "mine" not in written
    assert written["max_position_embeddings"] == described["max_position_embeddings"]
    assert written["eos_token_id"] == described["eos_token_id"]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:]
)
def test_the_type_that_most_numbers_are_stored_in_is_known(dtype: torch.dtype, tmp_path: Path) -> None:
    config = load_published_small()
    tensors = dict(Transformer(config).initialize(0).named_parameters())
    save_model(tmp_path / "target", config, tensors, dtype=dtype, source=None, max_shard_bytes=9_000)
    assert checkpoint.stored_dtype(tmp_path / "target") == dtype
    mixed = {name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}
    mixed["model.norm.weight"] = mixed["model.norm.weight"].to(torch.float32)
    (tmp_path / "mixed").mkdir()
    checkpoint.save_tensors(tmp_path / "mixed" / "model.safetensors", mixed)
    assert checkpoint.stored_dtype(tmp_path / "mixed") == dtype


def test_the_files_of_the_tokenizer_come_along_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    companions = [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "merges.txt",
    ]
    for name in (*companions, "README.md", "pytorch_model.bin", "optimizer.pt"):
        (saved / name).write_text(name)
    (saved / "additional_chat_templates").mkdir()
    (saved / "additional_chat_templates" / "tool.jinja").write_text("tool")
    save_small(tmp_path / "target", source=saved)
    written = {
        str(file.relative_to(tmp_path / "target"))
        for file in (tmp_path / "target").rglob("*")
        if file.is_file()
    }
    own = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "additional_chat_templates/tool.jinja",
    }
    assert written == {*companions, *own}
    assert (tmp_path / "target" / "merges.txt").read_text() == "merges.txt"


def test_an_existing_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_small(target, seed=1)
    (target / "tokenizer.json").write_text("of the old one")
    second = save_small(target, seed=2)
    assert hash_of(target) == second
    assert not (target / "tokenizer.json").exists()
    assert os.listdir(tmp_path) == ["target"]


def test_a_checkpoint_can_be_saved_over_its_own_source(saved: Path) -> None:
    (saved / "tokenizer.json").write_text("kept")
    expected = save_small(saved, source=saved)
    assert hash_of(saved) == expected
    assert (saved / "tokenizer.json").read_text() == "kept"


@pytest.mark.parametrize(
    ("module", "step"),
    [
        (checkpoint, "_write_tensors"),
        (checkpoint, "write_hf_json"),
        (checkpoint, "_copy_companions"),
        (files, "flush"),
    ],
)
def test_a_save_that_dies_leaves_the_old_checkpoint(
    module: ModuleType, step: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hash_of(saved)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, step, die)
        with pytest.raises(KeyboardInterrupt):
            save_small(saved, source=saved)
    assert hash_of(saved) == before
    assert save_small(saved, source=saved) == hash_of(saved)
    assert os.listdir(saved.parent) == ["saved"]


def test_every_file_of_a_checkpoint_is_flushed_before_the_rename(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved / "additional_chat_templates").mkdir()
    (saved / "additional_chat_templates" / "tool.jinja").write_text("tool")
    flushed: set[str] = set()
    monkeypatch.setattr(files, "flush", lambda path: flushed.add(path.name))
    save_small(saved, source=saved)
    assert flushed >= {file.name for file in saved.rglob("*")}


def test_a_save_that_dies_between_its_two_renames_can_be_repaired(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = hash_of(saved), Path.rename

    def rename_once(path: Path, target: Path) -> Path:
        if path.name.endswith(".new"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_once)
        with pytest.raises(KeyboardInterrupt):
            save_small(saved)
    old = saved.with_name(".saved.old")
    assert refusal(load_model_config, saved).endswith(f"rename {old} to saved")
    assert hash_of(old) == before
    assert save_small(saved) == hash_of(saved)
    assert os.listdir(saved.parent) == ["saved"]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664), (0o027, 0o640)])
def test_weights_have_the_permissions_that_the_umask_gives_any_file(
    umask: int, mode: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        save_small(tmp_path / "saved")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "saved").iterdir()} == {mode}


def test_a_directory_with_other_files_is_not_replaced(saved: Path, tmp_path: Path) -> None:
    (saved / "thesis.tex").write_text("years")
    message = refusal(save_small, saved)
    assert message.startswith(
        f"{saved}: holds thesis.tex, which replacing the folder would remove; move thesis.tex away,"
    )
    assert (saved / "thesis.tex").read_text() == "years"
    (tmp_path / "file").touch()
    assert refusal(save_small, tmp_path / "file").startswith(
        f"{tmp_path / 'file'}: is a file, where a folder is written;"
    )
    (tmp_path / "empty").mkdir()
    assert save_small(tmp_path / "empty") == hash_of(tmp_path / "empty")


def test_shards_are_filled_in_order_and_never_beyond_their_bound() -> None:
    shapes = {name: torch.Size([size]) for name, size in zip("abcdef", (3, 3, 10, 1, 2, 3), strict=True)}
    assert plan_shards(shapes, 2, 12) == [["a", "b"], ["c"], ["d", "e", "f"]]
    assert plan_shards(shapes, 2, 11) == [["a"], ["b"], ["c"], ["d", "e"], ["f"]]
    assert plan_shards(shapes, 2, 1000) == [list("abcdef")]


# ── identity ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_never_written_and_what_was_there_stays(
    value: float, tmp_path: Path
) -> None:
    before = save_small(tmp_path / "saved")
    config = load_published_small()
    tensors = dict(Transformer(config).initialize(0).named_parameters())
    with torch.no_grad():
        tensors["model.norm.weight"][-1] = value
    message = refusal(save_model, tmp_path / "saved", config, tensors, dtype=torch.float32, source=None)
    assert message.startswith("tensor model.norm.weight holds NaN or infinite values, and is not written; ")
    assert hash_of(tmp_path / "saved") == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_the_content_hash_sees_names_dtypes_shapes_and_bytes_but_no_order() -> None:
    base = {"a": torch.arange(6.0), "b": torch.tensor(1.0), "c": torch.zeros(2, dtype=torch.bfloat16)}
    same = [
        dict(reversed(base.items())),
        base | {"a": torch.arange(12.0)[::2] / 2},
        base | {"a": torch.arange(6.0).requires_grad_()},
    ]
    others = [
        {"a": base["a"]},
        base | {"d": torch.zeros(0)},
        {"a2" if name == "a" else name: tensor for name, tensor in base.items()},
        base | {"a": base["a"].reshape(2, 3)},
        base | {"a": base["a"].double()},
        base | {"a": base["a"].view(torch.int32)},
        base | {"c": -base["c"]},
        base | {"a": base["a"].flip(0)},
    ]
    assert {content_hash(tensors) for tensors in same} == {content_hash(base)}
    assert len({content_hash(tensors) for tensors in [base, *others]}) == len(others) + 1


def test_the_content_hash_of_a_policy_never_changes_its_meaning() -> None:
    assert content_hash({"w": torch.tensor([1.0, 2.0])}) == (
        "6dbfbed9dee3dbde593832616eda8879e9f9a924278893c8acb2ea5be161194a"
    )

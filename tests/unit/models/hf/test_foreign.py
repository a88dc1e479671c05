"""Models that our own decoder does not compute: read for an engine that loads them itself, and refused
wherever TLT would have to compute them; without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeConfig,
)

from tests.refused import refused
from tests.unit.apps.cli.parts import save_tokenizer, write_lines
from tlt.apps.cli import main as cli
from tlt.apps.run import start
from tlt.base.config.load import load_config
from tlt.base.speculation import Adaptive
from tlt.base.types import UserError
from tlt.engine.build.engine import load_engine
from tlt.engine.build.model import Model, load_model_for
from tlt.engine.settings import EngineSettings
from tlt.engine.vllm.inside import release

ROOT = Path(__file__).parents[4]
RECIPE, DRAFTER = ROOT / "recipes/countdown/quickstart.toml", ROOT / "recipes/countdown/drafter"

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
    "eos_token_id": 1,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
FOREIGN: dict[str, tuple[str, PreTrainedConfig]] = {
    "latent attention": ("DeepseekV3ForCausalLM", DeepseekV3Config(**SIZES)),
    "GPT-2, with names of its own": (
        "GPT2LMHeadModel",
        GPT2Config(vocab_size=61, n_positions=96, n_embd=32, n_layer=2, n_head=2, eos_token_id=1),
    ),
    "Qwen2 with positions by the longest text": (
        "Qwen2ForCausalLM",
        Qwen2Config(**SIZES, rope_parameters=DYNAMIC),
    ),
    "a Llama that is quantized": (
        "LlamaForCausalLM",
        LlamaConfig(**SIZES, quantization_config={"quant_method": "awq"}),
    ),
}
COMPOSITE: dict[str, tuple[str, type[PreTrainedConfig]]] = {
    "Qwen3.5, a mixture": ("Qwen3_5MoeForConditionalGeneration", Qwen3_5MoeConfig),
}
"""Models whose config.json has its text model's numbers under text_config."""
NO_EXPERTS = {"n_routed_experts": None}
ELSEWHERE = "; engine vllm may generate with it, but cannot train it"


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    """Writes everything but weights: nothing here computes."""
    architecture, config = FOREIGN[name]
    config.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "architectures": [architecture], **changes}))
    save_tokenizer(folder)
    return folder


@pytest.fixture(params=FOREIGN)
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(request.param, tmp_path / "model")


@pytest.mark.parametrize("name", COMPOSITE)
@pytest.mark.parametrize("says_all", [True, False], ids=["with its numbers", "with defaults left out"])
def test_the_text_model_of_a_composite_one_is_read_for_vllm(
    name: str, says_all: bool, tmp_path: Path
) -> None:
    architecture, family = COMPOSITE[name]
    config = family()
    text = config.get_text_config()
    if says_all:
        text.vocab_size, text.max_position_embeddings, text.eos_token_id = 61, 96, 1
    config.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [architecture]}
    if not says_all:
        for key in ("vocab_size", "max_position_embeddings", "eos_token_id"):
            described["text_config"].pop(key, None)
    described.pop("eos_token_id", None)
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if says_all:
        save_tokenizer(tmp_path)
    known = family.from_pretrained(tmp_path).get_text_config()
    wanted = (61, 96) if says_all else (known.vocab_size, known.max_position_embeddings)
    found = load_model_for(tmp_path, "vllm")
    assert (found.config.vocab_size, found.config.max_positions) == wanted
    assert found.stop_ids == ((1,) if says_all else ())
    with refused(r"config\.json: model_type is") as refusal:
        load_model_for(tmp_path, "tlt")
    assert str(refusal.value).endswith(ELSEWHERE)


@pytest.fixture
def latent(tmp_path: Path) -> Path:
    return write_model("latent attention", tmp_path / "model")


def test_its_bounds_and_tokens_are_read_for_vllm(foreign: Path) -> None:
    found = load_model_for(foreign, "vllm")
    assert not isinstance(found, Model)
    assert (found.config.vocab_size, found.config.max_positions, found.stop_ids) == (61, 96, (1,))
    assert found.decode is not None
    assert found.decode([2, 3]) == "01"


def test_our_own_engine_refuses_it_in_a_line_that_says_what_is_possible(foreign: Path) -> None:
    with refused(r"config\.json: \w+(\.\w+)? is ") as refusal:
        load_model_for(foreign, "tlt")
    assert str(refusal.value).endswith(ELSEWHERE)


@pytest.mark.parametrize("engine", ["tlt", "vllm"])
def test_a_model_that_we_compute_is_read_with_its_weights_for_both_engines(
    engine: Literal["tlt", "vllm"],
) -> None:
    found = load_model_for(ROOT / "recipes/countdown/base", engine)
    assert isinstance(found, Model)
    assert found.tensors


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "nobody_s"}, "transformers cannot read it (ValueError: "),
        (
            {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "nobody_s"},
            "transformers cannot read it (ValueError: ",
        ),
        ({"max_position_embeddings": "many"}, "config.json: "),
        (
            {"model_type": "mamba", "max_position_embeddings": None},
            "max_position_embeddings is None; it must be a positive integer",
        ),
        ({"vocab_size": -5}, "vocab_size is -5; it must be"),
        (
            {"architectures": ["LlamaForCausalLM"], **NO_EXPERTS},
            "model_type is 'deepseek_v3'; LlamaForCausalLM goes with",
        ),
    ],
)
def test_a_mistake_is_refused_for_vllm_too(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = write_model("latent attention", tmp_path / "model", **changes)
    with pytest.raises(UserError) as refusal:
        load_model_for(folder, "vllm")
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_no_learned_drafter_drafts_for_it(latent: Path) -> None:
    settings = EngineSettings(Adaptive(), engine="vllm")
    with refused(r"^drafter: .* cannot draft for .*; leave it out, and draft by retrieval"):
        load_engine(load_model_for(latent, "vllm"), settings, DRAFTER)


@pytest.mark.parametrize("changes", [{}, {"lora.rank": 4}, {"drafter.path": "none", "drafter.train": False}])
def test_training_it_is_refused_before_anything_starts(
    changes: dict[str, Any], latent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "version_of", lambda name: "0.32.0")
    config = load_config(RECIPE, {"model.path": str(latent), "rollout.engine": "vllm", **changes})
    with refused("model_type is 'deepseek_v3'; it was not compared") as refusal:
        start.preflight(config)
    assert str(refusal.value).endswith(ELSEWHERE)


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "MODEL", "--prompts", "prompts.jsonl", "--out", "out.jsonl"),
        ("drafter", "train", "MODEL", "--responses", "prompts.jsonl", "--out", "drafter"),
        ("plan", "memory", str(RECIPE), "--model.path", "MODEL"),
        ("bench", "MODEL", "--prompts", "prompts.jsonl"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_command_that_computes_it_itself_ends_in_one_line(
    command: tuple[str, ...],
    latent: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(latent.parent)
    write_lines("prompts.jsonl", {"prompt": "1", "problem_id": "a", "prompt_ids": [3], "token_ids": [4]})
    assert cli.main([str(latent) if word == "MODEL" else word for word in command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model_type is 'deepseek_v3'; it was not compared" in line
    assert line.endswith(ELSEWHERE)

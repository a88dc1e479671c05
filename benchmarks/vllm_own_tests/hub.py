"""Makes a cache of the Hugging Face hub in which the names that vLLM's tests ask for are local models.

    models--OWNER--NAME/refs/main, snapshots/REVISION/…      what a download would have left, with HF_HUB_OFFLINE=1

So no test is edited, and child processes find the same models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tlt.apps.cli.drafter import DrafterExport, export
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.models.hf.config import load_model_config

REVISION = "0" * 40
NUM_LAYERS = 4

STAND_INS: Mapping[str, tuple[str, ...]] = {
    "small": (
        "facebook/opt-125m",
        "facebook/opt-350m",
        "distilbert/distilgpt2",
        "meta-llama/Llama-3.2-1B",
        "meta-llama/Llama-3.2-1B-Instruct",
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "Qwen/Qwen1.5-7B",
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "amd/PARD-Llama-3.2-1B",
    ),
    "whole": (
        "hmellor/tiny-random-LlamaForCausalLM",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
    ),
    "eagle": ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "yuhuili/EAGLE-LLaMA3.1-Instruct-8B"),
    "eagle3": ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",),
    "small-eagle3": ("nm-testing/Llama3_2_1B_speculator.eagle3",),
}
"""By local model, the names on the hub that it stands for (DESCRIBED)."""

DESCRIBED: Mapping[str, str] = {
    "small": f"the first {NUM_LAYERS} layers of the model, with its tokenizer",
    "whole": "the model",
    "eagle": "its drafter, trained",
    "eagle3": "an EAGLE-3 drafter for it, random",
    "small-eagle3": "an EAGLE-3 drafter for the small one, random",
}


def make_hub(model: Path, drafter: Path, folder: Path) -> None:
    """Writes the cache into `folder`/hub. model: a Llama with its tokenizer; drafter: an EAGLE drafter for it."""
    made = {name: folder / "models" / name for name in STAND_INS}
    made["whole"] = model
    cut_layers(model, made["small"])
    export_as(drafter, model, "vllm-eagle", made["eagle"])
    for target, name in ((model, "eagle3"), (made["small"], "small-eagle3")):
        random = folder / "models" / f"{name}-random"
        torch.manual_seed(0)
        save_drafter(random, new_model(drafter_shape(load_model_config(target), "eagle3")), torch.float32)
        export_as(random, target, "vllm-eagle3", made[name])
    for name, hub_names in STAND_INS.items():
        for hub_name in hub_names:
            cached = folder / "hub" / f"models--{hub_name.replace('/', '--')}"
            (cached / "refs").mkdir(parents=True)
            (cached / "refs" / "main").write_text(REVISION)
            (cached / "snapshots").mkdir()
            (cached / "snapshots" / REVISION).symlink_to(made[name].resolve())


def cut_layers(model: Path, to: Path) -> None:
    """Copies a model without its later layers."""
    described = json.loads((model / "config.json").read_text())
    to.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            (to / file.name).write_bytes(file.read_bytes())
    (to / "config.json").write_text(json.dumps({**described, "num_hidden_layers": NUM_LAYERS}))
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < NUM_LAYERS}
    save_file(kept, to / "model.safetensors", {"format": "pt"})


def _layer(name: str) -> int:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else 0


def export_as(drafter: Path, target: Path, format: str, to: Path) -> None:
    export(DrafterExport.model_validate({"drafter": drafter, "target": target, "to": to, "format": format}))

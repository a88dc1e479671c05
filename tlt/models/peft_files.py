"""Adapters as PEFT's folders: adapter_config.json and adapter_model.safetensors, for PEFT, transformers and vLLM.

PEFT's names are ours behind `base_model.model.`. Knows neither ranks nor training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from tlt.config.lora import LoraSection
from tlt.files import replace_folder
from tlt.models.hf_files import write_json
from tlt.models.hf_weights import save_tensors

PREFIX = "base_model.model."


def save_adapter(path: Path, lora: LoraSection, tensors: Mapping[str, Tensor], base: str, revision: str | None) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained(base, path)` loads; one that was there is replaced.

    tensors: of the adapters alone, by our names.  base, revision: the model that they are for, as a folder or on the hub.
    """
    with replace_folder(path) as new:
        save_tensors(new / "adapter_model.safetensors", {PREFIX + name: tensor for name, tensor in tensors.items()})
        write_json(new / "adapter_config.json", adapter_config(lora, base, revision))


def adapter_config(lora: LoraSection, base: str, revision: str | None) -> dict[str, object]:
    """Returns PEFT's LoraConfig of what is trained here."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }

"""Part `attention`: causal attention within the packed sequences of an update, by one kernel, and
sequence by sequence.

error     of output and gradient, ‖found - reference‖ / ‖reference‖; the reference computes in float32
seconds   forward and backward of a layer
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.harness import Record, seconds_of
from tlt.models import flash
from tlt.models.attention import SharedPrompts
from tlt.models.attention_form import PLAIN, AttentionForm
from tlt.models.decoder import ModelConfig

MOST_ERROR = 2e-2


def layer(num_heads: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    size = num_heads * head_dim
    return ModelConfig("qwen2", 1, size, size, 1, num_heads, num_kv_heads, head_dim)


def attended(config: ModelConfig, families: list[tuple[int, list[int]]], qkv_NSD: Tensor) -> Tensor:
    return SharedPrompts(config, families)(0, qkv_NSD)


def no_kernel(qkv_NSD: Tensor, form: AttentionForm) -> bool:
    return False


def error(found: Tensor, reference: Tensor) -> float:
    return float((found.float() - reference.float()).norm() / reference.float().norm())


def main() -> None:
    record = Record.of_arguments()
    settings, device = record.settings, torch.device(record.settings["device"])
    config = layer(*settings["heads"])
    generator = torch.Generator(device).manual_seed(0)
    lengths = torch.randint(settings["longest"] // 8, settings["longest"], (settings["samples"],)).tolist()
    families = [(settings["prompt"], lengths)] * settings["families"]
    num_tokens = len(SharedPrompts(config, families).positions())
    shape = (num_tokens, config.num_qkv, config.head_dim)
    qkv_NSD = torch.randn(shape, device=device, generator=generator).bfloat16().requires_grad_()
    weights = torch.randn(num_tokens, config.hidden_size, device=device, generator=generator).bfloat16()

    def whole() -> tuple[Tensor, Tensor]:
        out = attended(config, families, qkv_NSD)
        (gradient,) = torch.autograd.grad(out, qkv_NSD, weights)
        return out, gradient

    serves = flash.serves
    record.add(
        served=serves(qkv_NSD.detach(), PLAIN), tokens=num_tokens, sequences=len(families) * len(lengths)
    )
    flash.serves = no_kernel
    precise_NSD = qkv_NSD.detach().float().requires_grad_()
    wanted = attended(config, families, precise_NSD)
    (wanted_gradient,) = torch.autograd.grad(wanted, precise_NSD, weights.float())
    for name in ("one kernel", "one by one"):
        flash.serves = serves if name == "one kernel" else no_kernel
        out, gradient = whole()
        errors = {"output": error(out, wanted), "gradient": error(gradient, wanted_gradient)}
        ms = 1e3 * seconds_of(whole, device, settings["calls"])
        record.append("attention", {"by": name, **errors, "ms": ms})
        assert max(errors.values()) < MOST_ERROR, f"{name}: {errors}"


if __name__ == "__main__":
    main()

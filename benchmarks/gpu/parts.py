"""The list of parts: what each measures on a GPU, for how long, and what of it a rehearsal on a CPU runs."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.gpu.harness import Part

SECONDS = 600.0
"""Of all parts together: what a lent machine gives a command."""

BATCHES = [1, 4, 16, 64, 256]
VARIANTS = ["adaptive", "4x1x4"]
LORA = {"lora.rank": 32, "lora.base_dtype": "bfloat16"}
HALF = {"parallel.policy": "fsdp", "parallel.param_dtype": "bfloat16"}
"""A group of one rank: the update computes in bfloat16, its weights stay float32."""


def parts_of_gpu() -> list[Part]:
    """Returns the parts in the order of what they tell for their time; their seconds add up to `SECONDS`."""
    common: dict[str, Any] = {"device": "cuda", "threads": min(os.cpu_count() or 1, 8)}
    law = {
        "draws": [[61, 8192], [1003, 4096], [5000, 2048], [152_064, 48]],
        "noise_vocab": 152_064, "vocabularies": [49_152, 151_936], "rows": [1, 16, 64, 256], "calls": 10,
    }  # fmt: skip
    equality = {
        "dtypes": ["float64", "float32", "bfloat16"], "variants": ["adaptive", "4x1x4", "4x3x12"],
        "batch": 64, "num_requests": 128, "num_on_cpu": 16, "max_tokens": 256,
    }  # fmt: skip
    steps = {"geometry": "qwen2.5-1.5b", "batches": [1, 64], "strategies": ["off", "4x1x4", "ngram:4x1x4"]}
    step = {
        "geometry": "qwen2.5-1.5b", "dtype": "bfloat16", "steps": 2, "problems": 8, "samples": 4, "max_tokens": 384,
        "tokens_per_micro_batch": 8192,
    }  # fmt: skip

    def throughput(size: str, seconds: float) -> Part:
        settings = {"dtype": "bfloat16", "batches": BATCHES, "variants": VARIANTS, "rounds": 2, "seconds": 0.5}
        return Part(f"throughput {size}", _module("throughput"), seconds, {**common, **settings, "geometry": f"qwen2.5-{size}"})

    vllm = {"geometry": "qwen2.5-0.5b", "dtype": "bfloat16", "batches": BATCHES, "tokens": 128}
    return [
        Part("environment", _module("environment"), 20, {**common, "copy_bytes": 2**30}),
        Part("law", _module("law"), 60, {**common, **law}),
        Part("equality", _module("equality"), 80, {**common, **equality}),
        Part("steps", _module("steps"), 50, {**common, **steps}),
        Part("step, LoRA", _module("training"), 55, {**common, **step, "keys": LORA}),
        Part("step, full weights", _module("training"), 60, {**common, **step, "keys": {}}),
        throughput("1.5b", 60),
        throughput("7b", 75),
        throughput("0.5b", 55),
        Part("step, full weights in bfloat16", _module("training"), 45, {**common, **step, "keys": HALF}),
        Part("vllm", _module("vllm"), 40, {**common, **vllm}),
    ]


def parts_of_rehearsal() -> list[Part]:
    """Returns the same parts in small, on a CPU: Triton interprets, the GPU of `steps` is the tests' pretended one."""
    common: dict[str, Any] = {"device": "cpu", "threads": 1}
    law = {"draws": [[61, 64], [5000, 8]], "noise_vocab": 5000, "vocabularies": [2048], "rows": [1, 2], "calls": 1}
    equality = {
        "dtypes": ["float64", "float32"], "variants": ["adaptive", "4x3x12"],
        "batch": 8, "num_requests": 12, "num_on_cpu": 4, "max_tokens": 40,
    }  # fmt: skip
    throughput = {"geometry": "tiny", "dtype": "float32", "batches": [1, 4], "variants": VARIANTS, "rounds": 1, "seconds": 0.3}
    step = {
        "geometry": "tiny", "dtype": "float32", "steps": 2, "problems": 2, "samples": 2, "max_tokens": 32,
        "tokens_per_micro_batch": 2048,
    }  # fmt: skip
    lora = {"lora.rank": 4}
    vllm = {"geometry": "tiny", "dtype": "float32", "batches": [1], "tokens": 8}
    return [
        Part("environment", _module("environment"), 60, {**common, "copy_bytes": 2**24}),
        Part("law", _module("law"), 120, {**common, **law}, {"TRITON_INTERPRET": "1"}),
        Part("equality", _module("equality"), 120, {**common, **equality}),
        Part("steps", _module("steps"), 90, {**common, "strategies": ["off", "learned:4x1x4", "hybrid:4x1x4"]}),
        Part("step, LoRA", _module("training"), 60, {**common, **step, "keys": lora}),
        Part("step, full weights", _module("training"), 60, {**common, **step, "keys": {}}),
        Part("throughput tiny", _module("throughput"), 60, {**common, **throughput}),
        Part("vllm", _module("vllm"), 10, {**common, **vllm}),
    ]


def _module(name: str) -> str:
    return f"benchmarks.gpu.{name}"

"""The list of parts: what each measures on a GPU, for how long, and what of it a rehearsal on a CPU runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.gpu.harness import Part

SECONDS = 690.0
"""Of all parts together; a lent machine gives a command 600: the last parts are then cut."""

BATCHES = [1, 4, 16, 64, 256]
VARIANTS = ["adaptive", "4x1x4"]
LORA = {"lora.rank": 32, "lora.base_dtype": "bfloat16"}
HALF = {"parallel.policy": "fsdp", "parallel.param_dtype": "bfloat16"}
"""A group of one rank: the update computes in bfloat16, its weights stay float32."""


def parts_of_gpu() -> list[Part]:
    """Returns the parts in the order of what they tell for their time; their seconds add up to `SECONDS`."""
    part = partial(_part, device="cuda", threads=min(os.cpu_count() or 1, 8))
    step = partial(
        part,
        "training",
        geometry="qwen2.5-1.5b",
        dtype="bfloat16",
        steps=2,
        problems=8,
        samples=4,
        max_tokens=384,
        tokens_per_micro_batch=8192,
    )
    equal = partial(
        part,
        "equal",
        dtype="bfloat16",
        text={"length": 600, "num_new": 9, "shared": 200},
        companies=[2, 5, 16, 64],
        most_rows=99,
        num_requests=64,
        max_tokens=200,
        batch=24,
        strategies=["known:4x1x4", "known:4x2x8"],
        batches=[1, 4, 16, 64],
        longest=400,
        rounds=2,
        seconds_a_round=0.4,
    )
    constant = partial(part, "throughput", dtype="bfloat16", batches=BATCHES, variants=VARIANTS, rounds=4,
                       seconds_a_round=0.5)  # fmt: skip
    return [
        part("environment", "environment", 20, copy_bytes=2**30),
        part(
            "law",
            "law",
            30,
            draws=[[61, 8192], [1003, 4096], [5000, 2048], [152_064, 48]],
            noise_vocab=152_064,
            vocabularies=[49_152, 151_936],
            rows=[1, 16, 64, 256],
            calls=10,
        ),
        part(
            "equality",
            "equality",
            75,
            dtypes=["float64", "float32", "bfloat16"],
            variants=["adaptive", "4x1x4", "4x3x12"],
            batch=64,
            num_requests=128,
            num_on_cpu=16,
            max_tokens=256,
        ),
        equal("equal rows 1.5b", 50, geometry="qwen2.5-1.5b"),
        equal("equal rows 7b", 60, geometry="qwen2.5-7b"),
        part(
            "attention",
            "attention",
            15,
            heads=[12, 2, 128],
            prompt=100,
            families=4,
            samples=8,
            longest=1024,
            calls=5,
        ),
        part(
            "steps",
            "steps",
            85,
            geometry="qwen2.5-1.5b",
            batches=[1, 64],
            strategies=["off", "4x1x4", "ngram:4x1x4"],
        ),
        step("step, LoRA", 40, keys=LORA),
        step("step, full weights", 45, keys={}),
        constant("throughput 1.5b", 65, geometry="qwen2.5-1.5b"),
        constant("throughput 7b", 65, geometry="qwen2.5-7b"),
        constant("throughput 0.5b", 55, geometry="qwen2.5-0.5b"),
        step("step, full weights in bfloat16", 45, keys=HALF),
        part("vllm", "vllm", 40, geometry="qwen2.5-0.5b", dtype="bfloat16", batches=BATCHES, tokens=128),
    ]


def parts_of_rehearsal() -> list[Part]:
    """Returns the same parts in small, on a CPU: Triton interprets, the GPU of `steps` is the tests'
    pretended one."""
    part = partial(_part, device="cpu", threads=1)
    step = partial(
        part,
        "training",
        geometry="tiny",
        dtype="float32",
        steps=2,
        problems=2,
        samples=2,
        max_tokens=32,
        tokens_per_micro_batch=2048,
    )
    interpreted = {"TRITON_INTERPRET": "1"}
    return [
        part("environment", "environment", 60, copy_bytes=2**24),
        part(
            "law",
            "law",
            120,
            interpreted,
            draws=[[61, 64], [5000, 8]],
            noise_vocab=5000,
            vocabularies=[2048],
            rows=[1, 2],
            calls=1,
        ),
        part(
            "equality",
            "equality",
            120,
            dtypes=["float64", "float32"],
            variants=["adaptive", "4x3x12"],
            batch=8,
            num_requests=12,
            num_on_cpu=4,
            max_tokens=40,
        ),
        part(
            "equal",
            "equal rows tiny",
            180,
            interpreted,
            geometry="tiny",
            dtype="bfloat16",
            text={"length": 70, "num_new": 3, "shared": 20},
            companies=[2],
            most_rows=5,
            num_requests=3,
            max_tokens=5,
            batch=2,
            strategies=["known:4x2x8"],
            batches=[1],
            longest=40,
            rounds=1,
            seconds_a_round=1,
        ),
        part(
            "attention",
            "attention",
            30,
            heads=[4, 2, 32],
            prompt=5,
            families=2,
            samples=3,
            longest=40,
            calls=1,
        ),
        part("steps", "steps", 90, strategies=["off", "learned:4x1x4", "hybrid:4x1x4"]),
        step("step, LoRA", 60, keys={"lora.rank": 4}),
        step("step, full weights", 60, keys={}),
        part(
            "throughput",
            "throughput tiny",
            60,
            geometry="tiny",
            dtype="float32",
            batches=[1, 4],
            variants=VARIANTS,
            rounds=1,
            seconds_a_round=0.3,
        ),
        part("vllm", "vllm", 10, geometry="tiny", dtype="float32", batches=[1], tokens=8),
    ]


def _part(
    module: str, name: str, seconds: float, variables: Mapping[str, str] | None = None, **settings: Any
) -> Part:
    return Part(name, f"benchmarks.gpu.{module}", seconds, settings, variables or {})

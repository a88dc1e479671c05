"""Attention of few new tokens over a cache: the compiled loops (tlt/models/compiled_attention.py) beside
PyTorch's SDPA.

    python -m benchmarks.attention --out benchmarks/results/attention

    alone      one layer's attention, keys and values of a batch read from memory: so many layers take turns
               that none stays in a cache. GB/s: bytes of the keys and values a second
    forward    the same within a forward of the whole model, head included

Every sequence has the same length, so SDPA's padding costs nothing here.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.command import make_parser
from benchmarks.linears import SMOLLM2, reading_speed, seconds_of_product
from tlt.bench.report import environment, markdown, table, write_report
from tlt.hf.geometry import GEOMETRIES
from tlt.models import attention
from tlt.models.attention import Cached
from tlt.models.compiled_attention import CompiledAttention
from tlt.models.decoder import Attend, ModelConfig, Transformer
from tlt.models.packed import PackedTransformer
from tlt.speculative.tree import chain_mask

TURNING_BYTES = 200e6
"""Bytes of the layers that take turns: far more than a processor's caches hold."""


def measure_alone(
    config: ModelConfig, batch: int, num_new: int, length: int, dtype: torch.dtype, rounds: int
) -> dict[str, Any]:
    """Returns the seconds of a layer's attention, by way and round."""
    columns_BT, mask = _places(batch, num_new, length, dtype)
    layer_bytes = batch * 2 * config.num_kv_heads * length * config.head_dim * dtype.itemsize
    layers = _layers(config, max(2, min(60, int(TURNING_BYTES / layer_bytes))), batch, length, dtype)
    qkv_NSD = torch.randn(batch * num_new, config.num_qkv, config.head_dim).to(dtype)
    loops = CompiledAttention(config.num_heads, layers, columns_BT, mask, [(num_new, length)] * batch, None)
    ways: dict[str, Attend] = {"loops": loops, "SDPA": Cached(config, layers, columns_BT, length, mask)}
    turns = {name: [partial(_attend, way, i) for i in range(len(layers))] for name, way in ways.items()}
    return {"bytes": layer_bytes, "seconds": seconds_of_product(turns, qkv_NSD, rounds)}


def measure_forward(
    model: PackedTransformer, batch: int, num_new: int, length: int, rounds: int
) -> dict[str, Any]:
    """Returns the seconds of a forward, by way and round."""
    config = model.config
    columns_BT, mask = _places(batch, num_new, length, model.dtype)
    layers = _layers(config, config.num_layers, batch, length, model.dtype)
    tokens_N = torch.randint(config.vocab_size, (batch * num_new,))

    def forward(_: Tensor, has_loops: bool) -> Tensor:
        with patch.object(
            attention, "attention_loops", attention.attention_loops if has_loops else lambda: None
        ):
            attend = attention.cached(config, layers, columns_BT, length, mask, [length] * batch)
        return model.logits(model.forward(tokens_N, columns_BT.flatten(), attend))

    ways: dict[str, list[Callable[[Tensor], Tensor]]] = {
        name: [partial(forward, has_loops=has_loops)] * 2
        for name, has_loops in (("loops", True), ("SDPA", False))
    }
    return {"seconds": seconds_of_product(ways, tokens_N, rounds)}


def _places(batch: int, num_new: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Returns where the new tokens lie, the last of each sequence, and what they see."""
    columns_BT = torch.arange(length - num_new, length).repeat(batch, 1)
    return columns_BT, None if num_new == 1 else chain_mask(columns_BT, length, dtype)


def _layers(
    config: ModelConfig, num_layers: int, batch: int, length: int, dtype: torch.dtype
) -> list[Tensor]:
    return [
        torch.randn(batch, 2 * config.num_kv_heads, length, config.head_dim).to(dtype)
        for _ in range(num_layers)
    ]


def _attend(way: Attend, layer: int, qkv_NSD: Tensor) -> Tensor:
    return way(layer, qkv_NSD)


@torch.inference_mode()
def measure(models: Mapping[str, ModelConfig], options: argparse.Namespace) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    dtype = getattr(torch, options.dtype)
    for name, config in models.items():
        for length, num_new, batch in itertools.product(options.lengths, options.new_tokens, options.batches):
            cell = {"model": name, "length": length, "new": num_new, "batch": batch, "what": "alone"}
            cells.append(cell | measure_alone(config, batch, num_new, length, dtype, options.rounds))
        packed = PackedTransformer(config, dtype, torch.device("cpu"))
        packed.load(dict(Transformer(config).initialize(0).state_dict()), 0)
        for num_new, batch in itertools.product((1, 4), options.batches):
            cell = {
                "model": name,
                "length": options.lengths[0],
                "new": num_new,
                "batch": batch,
                "what": "forward",
            }
            cells.append(cell | measure_forward(packed, batch, num_new, options.lengths[0], options.rounds))
        print(f"{name}: done", flush=True)
    return cells


def to_markdown(report: Mapping[str, Any]) -> str:
    """Returns the report for people."""
    tables = []
    for what, unit in (("alone", "µs"), ("forward", "ms")):
        rows = []
        for cell in (cell for cell in report["cells"] if cell["what"] == what):
            took = {way: statistics.median(seconds) for way, seconds in cell["seconds"].items()}
            ratios = sorted(sdpa / loops for loops, sdpa in zip(*cell["seconds"].values(), strict=True))
            shown = [
                f"{took[way] * (1e6 if unit == 'µs' else 1e3):.{0 if unit == 'µs' else 1}f}" for way in took
            ]
            speed = [f"{cell['bytes'] / 1e9 / took['loops']:.1f}"] if what == "alone" else []
            times = f"{took['SDPA'] / took['loops']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            rows.append([cell["model"], cell["length"], cell["new"], cell["batch"], *shown, times, *speed])
        columns = ["model", "tokens", "new", "batch", f"loops, {unit}", f"SDPA, {unit}", "times SDPA"]
        tables += [f"## {what.capitalize()}", table(columns + ["loops, GB/s"] * (what == "alone"), rows)]
    said = (
        f"Memory is read at {report['reading']:.1f} GB/s by a sum. Medians of {report['num_rounds']} rounds "
        "in turns, and the "
        f"range of their ratios; {report['dtype']}, {report['threads']} threads."
    )
    return markdown("Attention over a cache on a CPU", report, said, *tables)


def main() -> None:
    parser = make_parser("attention", __doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[96, 1024],
        help="tokens of a sequence, the new ones included",
    )
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args()
    models = {"smollm2-135m": SMOLLM2, "qwen2.5-0.5b": GEOMETRIES["qwen2.5-0.5b"]}
    report = {
        "command": f"python -m benchmarks.attention --rounds {options.rounds} --dtype {options.dtype}",
        "environment": environment(),
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "num_rounds": options.rounds,
        "reading": reading_speed(options.rounds),
        "cells": measure(models, options),
    }
    write_report(options.out, report, to_markdown(report))


if __name__ == "__main__":
    main()

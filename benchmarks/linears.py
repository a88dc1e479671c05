"""The engine's frozen matrices (tlt/models/packed.py) beside what else multiplies on a CPU, and beside what
the machine can do.

    python -m benchmarks.linears --out benchmarks/results/linears

Matrices of a model's sizes are multiplied with 1 to 64 rows: by the engine, by F.linear, and by oneDNN's
kernel as it is, without the engine's choice of rows. So many copies of a matrix take turns that none stays in
a cache.

    GB/s       bytes of the matrix a second: what bounds few rows, beside the rate at which memory is read at
               all
    GFLOP/s    what bounds many rows, beside one product of large matrices
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command import make_parser
from tlt.bench.measure import in_turns, seconds_of
from tlt.bench.report import environment, markdown, table, write_report
from tlt.hf.geometry import GEOMETRIES
from tlt.models.cpu_kernels import OneDnnMatrix
from tlt.models.decoder import ModelConfig
from tlt.models.packed import PackedLinear

ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
TURNING_BYTES = 400e6
"""Bytes of the copies that take turns: far more than a processor's caches hold."""
SMOLLM2 = ModelConfig("llama", 49_152, 576, 1536, 30, 9, 3, 64, tie_embeddings=True)

Product = Callable[[Tensor], Tensor]


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns (inputs, outputs) of a model's matrices, by name."""
    c = config
    return {
        "qkv": (c.hidden_size, c.num_qkv * c.head_dim),
        "gate and up": (c.hidden_size, 2 * c.intermediate_size),
        "down": (c.intermediate_size, c.hidden_size),
        "head": (c.hidden_size, c.vocab_size),
    }


def ways_of(num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, list[Product]]:
    """Returns the ways to multiply, each with copies of the matrix that take turns."""
    num_copies = max(2, min(60, int(TURNING_BYTES / (num_in * num_out * dtype.itemsize))))
    engine: list[Product] = []
    plain: list[Product] = []
    kernel: list[Product] = []
    for _ in range(num_copies):
        weight = torch.randn(num_out, num_in, dtype=dtype)
        packed = PackedLinear(num_in, num_out, dtype, torch.device("cpu"))
        packed.load(weight)
        engine.append(packed)
        plain.append(partial(F.linear, weight=weight))
        laid_out = OneDnnMatrix(num_in * num_out, dtype)
        laid_out.load(weight)
        kernel.append(partial(_kernel, laid_out))
    return {"engine": engine, "F.linear": plain, "oneDNN": kernel}


def _kernel(matrix: OneDnnMatrix, x_NI: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, matrix.packed, None, "none", [], "")
    return product


def seconds_of_product(
    ways: Mapping[str, Sequence[Product]], x_NI: Tensor, num_rounds: int
) -> dict[str, list[float]]:
    """Returns the seconds of a product that each way takes in each round; the first round is not counted."""

    def turn(copies: Sequence[Product]) -> float:
        return seconds_of(lambda: [multiply(x_NI) for multiply in copies]) / len(copies)

    found = in_turns({name: partial(turn, copies) for name, copies in ways.items()}, num_rounds + 1)
    return {name: seconds[1:] for name, seconds in found.items()}


def reading_speed(num_rounds: int) -> float:
    """Returns GB/s at which this machine reads memory, as a sum of floats does."""
    values = torch.ones(int(TURNING_BYTES) // 4)
    seconds = seconds_of_product({"sum": [lambda x: x.sum()]}, values, num_rounds)["sum"]
    return TURNING_BYTES / 1e9 / statistics.median(seconds)


def multiplying_speed(num_rounds: int, size: int = 2048) -> float:
    """Returns GFLOP/s of a product of two large matrices in float32."""
    way = ways_of(size, size, torch.float32)["oneDNN"][:2]
    seconds = seconds_of_product({"product": way}, torch.randn(size, size), num_rounds)["product"]
    return 2 * size**3 / 1e9 / statistics.median(seconds)


@torch.inference_mode()
def measure(models: Mapping[str, ModelConfig], dtype: torch.dtype, num_rounds: int) -> list[dict[str, Any]]:
    cells = []
    for model, config in models.items():
        for matrix, (num_in, num_out) in matrices(config).items():
            ways = ways_of(num_in, num_out, dtype)
            for rows in ROWS:
                seconds = seconds_of_product(ways, torch.randn(rows, num_in, dtype=dtype), num_rounds)
                of = {"inputs": num_in, "outputs": num_out, "bytes": num_in * num_out * dtype.itemsize}
                cells.append({"model": model, "matrix": matrix, "rows": rows, **of, "seconds": seconds})
            print(f"{model}, {matrix}: done", flush=True)
    return cells


def to_markdown(report: Mapping[str, Any]) -> str:
    """Returns the report for people."""
    rows = []
    for cell in report["cells"]:
        took = {name: statistics.median(seconds) for name, seconds in cell["seconds"].items()}
        speeds = [f"{cell['bytes'] / 1e9 / took[name]:.1f}" for name in took]
        flops = 2 * cell["rows"] * cell["inputs"] * cell["outputs"] / 1e9 / took["engine"]
        fastest = min(took.values()) / took["engine"]
        rows.append([cell["model"], cell["matrix"], cell["rows"], *speeds, f"{flops:.0f}", f"{fastest:.2f}"])
    names = list(report["cells"][0]["seconds"])
    columns = [
        "model",
        "matrix",
        "rows",
        *(f"{name}, GB/s" for name in names),
        "engine, GFLOP/s",
        "of the fastest",
    ]
    bounds = (
        f"Memory is read at {report['reading']:.1f} GB/s by a sum; two matrices of 2,048 x 2,048 are "
        "multiplied at "
        f"{report['multiplying']:.0f} GFLOP/s. Medians of {report['num_rounds']} rounds in turns, "
        f"{report['dtype']}, "
        f"{report['threads']} threads."
    )
    return markdown("Frozen matrices on a CPU", report, bounds, table(columns, rows))


def main() -> None:
    parser = make_parser("linears", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--geometry", choices=sorted(GEOMETRIES), default="qwen2.5-0.5b", help="sizes beside SmolLM2's"
    )
    options = parser.parse_args()
    models = {"smollm2-135m": SMOLLM2, options.geometry: GEOMETRIES[options.geometry]}
    report = {
        "command": f"python -m benchmarks.linears --rounds {options.rounds} --dtype {options.dtype}",
        "environment": environment(),
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "num_rounds": options.rounds,
        "reading": reading_speed(options.rounds),
        "multiplying": multiplying_speed(options.rounds),
        "cells": measure(models, getattr(torch, options.dtype), options.rounds),
    }
    write_report(options.out, report, to_markdown(report))


if __name__ == "__main__":
    main()

"""Products of few and many rows by compiled loops, beside oneDNN's packed ones, in turns.

python -m benchmarks.products --out RESULT

GFLOPS of one thread, and bytes of the matrix read a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import command_of, make_parser
from benchmarks.report import environment, markdown, table, write_report
from tlt.models.loops.products import PRODUCT_DTYPES, Panels

SHAPES = ((896, 896), (9728, 896), (896, 4864), (768, 256), (1000, 256))
"""(outputs, inputs): attention's output, gate and up, and down of Qwen2.5-0.5B; two small ones."""
ROWS = (1, 2, 4, 8, 16, 64, 256)
SECONDS, TURNS = 0.03, 9


def onednn(weight_OI: Tensor) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)

    def multiply(x_NI: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, packed, None, "none", [], "")
        return product

    return multiply


def seconds_of(multiply: Callable[[Tensor], Tensor], x_NI: Tensor, num: int) -> float:
    begun = time.perf_counter()
    for _ in range(num):
        multiply(x_NI)
    return (time.perf_counter() - begun) / num


def measure(shape: tuple[int, int], dtype: torch.dtype) -> list[dict[str, Any]]:
    weight_OI = torch.randn(shape).to(dtype)
    panels = Panels(shape[1], shape[0], dtype)
    panels.load(weight_OI)
    programs, found = {"ours": panels.multiply, "onednn": onednn(weight_OI)}, []
    for rows in ROWS:
        x_NI = torch.randn(rows, shape[1]).to(dtype)
        num = max(1, int(SECONDS / seconds_of(panels.multiply, x_NI, 3)))
        turns = [{name: seconds_of(f, x_NI, num) for name, f in programs.items()} for _ in range(TURNS + 1)][
            1:
        ]
        medians = {name: statistics.median(turn[name] for turn in turns) for name in programs}
        ratios = [turn["onednn"] / turn["ours"] for turn in turns]
        found.append(
            {
                "rows": rows,
                **medians,
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return found


def to_markdown(report: Mapping[str, Any]) -> str:
    rows = []
    for cell in report["measurements"]:
        (num_out, num_in), size = cell["shape"], 2 if cell["dtype"] == "bfloat16" else 4
        for m in cell["rows"]:
            gflops = [2e-9 * m["rows"] * num_out * num_in / m[name] for name in ("ours", "onednn")]
            read = 1e-9 * num_out * num_in * size / m["ours"]
            ratio = f"{m['ratio']:.2f} ({m['least']:.2f} – {m['most']:.2f})"
            rows.append(
                [
                    cell["dtype"],
                    f"{num_out} × {num_in}",
                    m["rows"],
                    *(f"{g:.0f}" for g in gflops),
                    f"{read:.0f}",
                    ratio,
                ]
            )
    head = [
        "type",
        "outputs × inputs",
        "rows",
        "GFLOPS",
        "oneDNN's",
        "matrix, GB/s",
        "times as fast (least – most)",
    ]
    return markdown(
        "Products in compiled loops", report, f"Medians of {TURNS} turns, one thread.", table(head, rows)
    )


def main() -> None:
    parser = make_parser("products", __doc__)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells: list[dict[str, Any]] = []
    report = {"command": command_of(parser), "environment": environment(), "measurements": cells}
    for dtype in PRODUCT_DTYPES:
        for shape in SHAPES:
            name = str(dtype).removeprefix("torch.")
            cells.append({"dtype": name, "shape": shape, "rows": measure(shape, dtype)})
            write_report(options.out, report, to_markdown(report))


if __name__ == "__main__":
    main()

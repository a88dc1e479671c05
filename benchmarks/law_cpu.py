"""The law's compiled loops (tlt/speculative/compiled.py) beside the reference in PyTorch, on this machine's
CPU.

    milliseconds   a row of logits: token and log-probability; the noise that drafts are ranked with
    tokens         draws of both, one by one: temperatures, ties and truncations

    python -m benchmarks.law_cpu --out benchmarks/results/law-cpu

Both ways take turns, round by round; medians, with the least and the most.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import command_of, make_parser
from tlt.bench.measure import in_turns, seconds_of
from tlt.bench.report import environment, markdown, number, table, write_report
from tlt.speculative.draw import draw, draw_by_definition, noise_to_rank_with
from tlt.speculative.params import BatchParams
from tlt.speculative.sampling import gumbel_noise
from tlt.types import SamplingParams

VOCABULARIES = (49_152, 151_936)
LAWS = (SamplingParams(), SamplingParams(0.6), SamplingParams(0.0), SamplingParams(2.0), SamplingParams(1e-4))
DRAFT_VOCAB = 8192
Law = tuple[Tensor, Tensor, Tensor, BatchParams]


def rows(num_rows: int, vocab_size: int, seed: int, laws: tuple[SamplingParams, ...]) -> Law:
    """Returns logits as a language model's are: a few likely tokens above a broad rest."""
    generator = torch.Generator().manual_seed(seed)
    logits_RV = 2.5 * torch.randn(num_rows, vocab_size, generator=generator)
    logits_RV.scatter_add_(
        1, torch.randint(vocab_size, (num_rows, 4), generator=generator), torch.full((num_rows, 4), 9.0)
    )
    keys_R4 = torch.randint(2**32, (num_rows, 4), generator=generator)
    positions_R = torch.randint(100_000, (num_rows,), generator=generator)
    return logits_RV, keys_R4, positions_R, BatchParams([laws[row % len(laws)] for row in range(num_rows)])


def measure_times(num_rounds: int) -> list[dict[str, Any]]:
    found = []
    for vocab_size in VOCABULARIES:
        for num_threads in sorted({1, torch.get_num_threads()}):
            for num_rows in (1, 16, 64):
                case = rows(num_rows, vocab_size, num_rows, LAWS[:1])
                _, keys_R4, positions_R, _ = case
                some = torch.randperm(vocab_size)[:DRAFT_VOCAB]
                ways: dict[str, Callable[[], object]] = {
                    "reference": partial(draw_by_definition, *case),
                    "loops": partial(draw, *case),
                    "noise, reference": partial(gumbel_noise, keys_R4, positions_R[:, None], vocab_size),
                    "noise": partial(noise_to_rank_with, keys_R4, positions_R, vocab_size),
                    f"noise of {DRAFT_VOCAB}": partial(
                        noise_to_rank_with, keys_R4, positions_R, vocab_size, some
                    ),
                }
                before = torch.get_num_threads()
                torch.set_num_threads(num_threads)
                for way in ways.values():
                    way()
                seconds = in_turns({name: partial(seconds_of, way) for name, way in ways.items()}, num_rounds)
                milliseconds = {
                    name: [1e3 * one / num_rows for one in took] for name, took in seconds.items()
                }
                torch.set_num_threads(before)
                found.append(
                    {"vocab_size": vocab_size, "threads": num_threads, "rows": num_rows, "ms": milliseconds}
                )
    return found


def compare_tokens(num_draws: int) -> dict[str, int]:
    """Returns how many draws of small and large vocabularies were compared, and how many tokens differ."""
    laws = (
        *LAWS,
        SamplingParams(1.0, top_k=20),
        SamplingParams(0.8, top_p=0.9),
        SamplingParams(1.2, min_p=0.05),
    )
    compared = different = 0
    seed = 0
    while compared < num_draws:
        seed += 1
        vocab_size = (61, 257, 1003, 4099)[seed % 4]
        logits_RV, keys_R4, positions_R, params = rows(1 << 13, vocab_size, seed, laws)
        if seed % 3 == 0:
            logits_RV = logits_RV.round()  # many equal logits
        law = (keys_R4, positions_R, params)
        found, expected = draw(logits_RV, *law)[0], draw_by_definition(logits_RV, *law)[0]
        compared, different = compared + len(found), different + int((found != expected).sum())
    large = 0
    for vocab_size in VOCABULARIES:
        for seed in range(8):
            case = rows(64, vocab_size, 100 + seed, LAWS)
            different += int((draw(*case)[0] != draw_by_definition(*case)[0]).sum())
            large += 64
    return {"compared": compared, "compared_large": large, "different": different}


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def to_markdown(report: dict[str, Any]) -> str:
    names = list(report["times"][0]["ms"])
    cells = []
    for case in report["times"]:
        milliseconds = case["ms"]
        ratio = statistics.median(milliseconds["reference"]) / statistics.median(milliseconds["loops"])
        told = [spread(milliseconds[name]) for name in names]
        cells.append([f"{case['vocab_size']:,}", case["threads"], case["rows"], *told, number(ratio, ".1f")])
    tokens = report["tokens"]
    return markdown(
        "The law on a CPU: compiled loops beside the reference",
        report,
        "Milliseconds a row, median (least to most) of rounds in turns.",
        table(["vocabulary", "threads", "rows", *names, "reference / loops"], cells),
        f"Draws compared one by one: {tokens['compared']:,} of vocabularies of 61 to 4,099 tokens, at "
        "temperatures 0 to 2, "
        f"with many equal logits and with truncations among them, and {tokens['compared_large']:,} of "
        "49,152 and 151,936. "
        f"Tokens that differ: {tokens['different']}.",
    )


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("law_cpu", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--draws", type=int, default=1_000_000)
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {
        "command": command_of(parser, arguments),
        "environment": environment(),
        "times": measure_times(options.rounds),
        "tokens": compare_tokens(options.draws),
    }
    write_report(options.out, report, to_markdown(report))
    return int(report["tokens"]["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())

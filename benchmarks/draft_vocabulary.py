"""The draft vocabulary measured: what a chain of drafts costs by its size, and how much of new responses a choice covers.

    python -m benchmarks.draft_vocabulary chain --out benchmarks/results/draft-vocabulary-chain
    python -m benchmarks.draft_vocabulary coverage RESPONSES.jsonl --vocabulary 49152 --out benchmarks/results/draft-vocabulary

`chain` drafts chains of four at the size of a well-known model, all sizes of the vocabulary in turns, engine step by engine
step; weights are random, for they cost the same. `coverage` chooses by the first responses and looks at the last quarter.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tlt.bench.report import environment, provenance, table, write_report
from tlt.build.engine import EngineSettings, build_engine
from tlt.config.drafter import DrafterSection
from tlt.drafter.drafting.hybrid import HybridDrafter
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.drafter.response_files import read_responses
from tlt.drafter.vocabulary import count_tokens, ranked
from tlt.models.decoder import ModelConfig
from tlt.models.geometry import find_geometry
from tlt.models.hf_weights import expected_shapes
from tlt.tuning.tuner import Fixed
from tlt.types import Request, Rollout, SamplingParams, Strategy

SIZES = (1024, 2048, 4096, 8192, 16_384, 32_768)
DEPTH = 4
WINDOW = 512


def random_policy(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Returns weights of the right shapes, without a normal distribution's minutes."""
    return {name: torch.full(shape, 1e-3).bernoulli_(0.5).mul_(1e-2) for name, shape in expected_shapes(config).items()}


class Chains:
    """An engine whose batch stays full and that drafts chains. seconds: of each draft, and of all else in a step."""

    def __init__(self, config: ModelConfig, policy: Any, batch_size: int) -> None:
        model = DraftModel(drafter_shape(config)).initialize(2)
        stored = StoredDrafter(model.config, model.state_dict(), {})
        drafting = DrafterSection(confidence_threshold=1e-12, vocabulary="full")
        settings = EngineSettings(max_batch_size=batch_size, drafting=drafting, kv_gib=0.5)
        self.engine = build_engine(config, policy, settings, stored, tuner=Fixed(Strategy("learned", DEPTH, 1, DEPTH)))
        assert isinstance(self.engine.drafter, HybridDrafter)
        self.learned = self.engine.drafter.learned
        self.seconds: list[float] = []
        self._propose = self.learned.propose
        self.learned.propose = self._timed  # type: ignore[method-assign, assignment]
        rng = random.Random(0)
        params = SamplingParams(max_tokens=WINDOW - 32)
        self.engine.add(Request(f"p{i}", 0, tuple(rng.randrange(1000) for _ in range(16)), params) for i in range(batch_size))

    def _timed(self, *given: Any) -> Any:
        start = time.perf_counter()
        proposal = self._propose(*given)
        self.seconds.append(time.perf_counter() - start)
        return proposal

    def step(self, size: int | None) -> tuple[float, float]:
        """Makes a step with so many tokens to propose (None: all). Returns the seconds of its draft, and of all else."""
        ids = None if size is None else torch.arange(size)
        if self.learned.model.num_proposed != (size or self.engine.model.config.vocab_size):
            self.learned.model.choose(ids)
            self.engine.step()  # rows of the head are copied, and kernels made
        start = time.perf_counter()
        self.engine.step()
        return self.seconds[-1], time.perf_counter() - start - self.seconds[-1]


def measure_chains(config: ModelConfig, batches: Sequence[int], num_rounds: int) -> list[dict[str, Any]]:
    policy = random_policy(config)
    found: list[dict[str, Any]] = []
    for batch_size in batches:
        chains = Chains(config, policy, batch_size)
        for _ in range(3):
            chains.engine.step()
        seconds: dict[str, list[float]] = {name: [] for name in ("all", *map(str, SIZES))}
        rest = []
        for _ in range(num_rounds):
            for name in seconds:
                drafted, other = chains.step(None if name == "all" else int(name))
                seconds[name].append(drafted)
                rest.append(other)
        found.append({"batch_size": batch_size, "chain": seconds, "rest": rest})
        del chains
    return found


def chains_to_markdown(report: dict[str, Any]) -> str:
    lines = ["# A chain of four drafts, by the size of the draft vocabulary", "", *provenance(report), ""]
    caption = "Milliseconds a chain, medians of rounds in turns. The rest of a step is the target's forward and the law."
    lines += [f"{report['model']}, float32. {caption}", ""]
    names = list(report["times"][0]["chain"])
    cells = []
    for case in report["times"]:
        milliseconds = {name: 1e3 * statistics.median(case["chain"][name]) for name in names}
        told = [f"{milliseconds[name]:.1f}" for name in names]
        cells.append([case["batch_size"], *told, f"{1e3 * statistics.median(case['rest']):.0f}"])
    return "\n".join([*lines, table(["batch", *names, "rest of the step"], cells)]) + "\n"


def measure_coverage(rollouts: Sequence[Rollout], vocab_size: int) -> dict[str, Any]:
    """Returns, by number of responses counted and by size, the part of the last quarter's tokens that a choice holds."""
    held_out = rollouts[len(rollouts) * 3 // 4 :]
    target_V = count_tokens((token for rollout in held_out for token in rollout.token_ids), vocab_size)
    found: dict[str, Any] = {"held_out_tokens": int(target_V.sum()), "rows": []}
    num = 4
    while num <= len(rollouts) * 3 // 4:
        counts_V = count_tokens((token for rollout in rollouts[:num] for token in rollout.token_ids), vocab_size)
        prompts_V = count_tokens((token for rollout in rollouts[:num] for token in rollout.prompt_ids), vocab_size)
        row: dict[str, Any] = {"responses": num, "tokens": int(counts_V.sum()), "distinct": int((counts_V > 0).sum())}
        for name, some_V in (("coverage", counts_V), ("with_prompts", counts_V + 0.01 * prompts_V)):
            row[name] = [float(target_V[ranked(some_V)[:size]].sum() / target_V.sum()) for size in SIZES]
        found["rows"].append(row)
        num *= 2
    return found


def coverage_to_markdown(report: dict[str, Any]) -> str:
    lines = ["# What a draft vocabulary covers of new responses", "", *provenance(report), ""]
    lines += [f"Part of {report['held_out_tokens']:,} tokens of later responses, by the responses counted before.", ""]
    cells = [
        [row["responses"], f"{row['tokens']:,}", f"{row['distinct']:,}", *(f"{share:.3f}" for share in row["coverage"])]
        for row in report["rows"]
    ]
    lines += [table(["responses", "tokens", "distinct", *(f"{size:,}" for size in SIZES)], cells), ""]
    cells = [[row["responses"], *(f"{share:.3f}" for share in row["with_prompts"])] for row in report["rows"]]
    lines += ["The prompts' tokens too, after all that were sampled:", ""]
    return "\n".join([*lines, table(["responses", *(f"{size:,}" for size in SIZES)], cells)]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_vocabulary", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    chain, coverage = commands.add_parser("chain"), commands.add_parser("coverage")
    chain.add_argument("--geometry", default="qwen2.5-0.5b")
    chain.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    chain.add_argument("--rounds", type=int, default=9)
    chain.add_argument("--threads", type=int, default=2)
    coverage.add_argument("responses", type=Path)
    coverage.add_argument("--vocabulary", type=int, required=True)
    for command in (chain, coverage):
        command.add_argument("--out", type=Path, required=True, help="where to write RESULT.json and RESULT.md")
    options = parser.parse_args(arguments)
    given = " ".join(arguments if arguments is not None else sys.argv[1:])
    report: dict[str, Any] = {"command": f"python -m benchmarks.draft_vocabulary {given}", "environment": environment()}
    if options.what == "chain":
        torch.set_num_threads(options.threads)
        config = replace(find_geometry(options.geometry).sizes, max_positions=WINDOW)
        report |= {"model": options.geometry, "times": measure_chains(config, options.batches, options.rounds)}
        write_report(options.out, report, chains_to_markdown(report))
    else:
        rollouts = read_responses(options.responses, vocab_size=options.vocabulary, window=2**20)
        report |= measure_coverage(rollouts, options.vocabulary)
        write_report(options.out, report, coverage_to_markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What do caches as rectangles cost, beside caches in pages of the same memory?

    python -m benchmarks.scale.rectangles --out benchmarks/results/scale-rectangles

    rectangle   slots × the longest             every running sequence has room for as many tokens as the longest: the engine's
    pages       Σ whole blocks of each one      does not exist: who fits and who leaves is decided so, storage has no bound

Who is admitted (where an eighth more tokens would still fit) and who leaves (the shortest) are the same in both. First a real
engine generates with both, and says the same tokens as without a budget. Then, with the bytes of Qwen2.5-7B and responses up to
32k tokens, the same decisions are made without a model: the engine's own scheduler and memory, caches without storage, a step
being one token for each running sequence. That this counts as the engine does is asserted on what the engine did.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.longtail import read_workload
from tlt.bench.report import environment, provenance, table, write_report
from tlt.build.engine import EngineSettings, build_engine, load_stored
from tlt.build.model import load_model
from tlt.engine.engine import RolloutEngine
from tlt.engine.memory import CacheMemory
from tlt.engine.scheduler import Scheduler
from tlt.models.decoder import ModelConfig
from tlt.models.hf_config import parse_config
from tlt.models.kv_cache import Cache
from tlt.types import Request, SamplingParams

RECIPE = Path("recipes/countdown")
GIB = 2**30
SOME = slice(22, 39)
"""Neighbours in the workload with three long responses among them: enough to fill a small memory."""
PAGE = 16
LONGEST = 32768


class PagedMemory(CacheMemory):
    """Decides as if each sequence took as many blocks as it fills itself; its storage has no bound.

    block: tokens of a page.
    """

    def __init__(self, memory: CacheMemory, scheduler: Scheduler, block: int) -> None:
        super().__init__(memory.cache, memory.window, memory._cache_bytes)
        self.scheduler, self.block, self.drafter = scheduler, block, memory.drafter
        self.token_bytes = self.slot_bytes(memory.window) // memory.window

    def _fits(self, lengths: Sequence[int]) -> bool:
        limit = self.budget.max_bytes
        return limit is None or sum(-(-n // self.block) * self.block for n in lengths) * self.token_bytes <= limit

    def has_room(self, num_slots: int, length: int) -> bool:
        spare = length - self.scheduler.longest
        return self._fits([len(sequence.tokens) + spare for sequence in self.scheduler.running])

    def fits_longer(self, num_slots: int, length: int) -> bool:
        """Returns whether the running sequences and the first that waits could go on for a while."""
        first = self.scheduler.waiting[0]
        lengths = [len(sequence.tokens) for sequence in self.scheduler.running]
        return self._fits([self._longer(n) for n in (*lengths, len(first.prompt_ids) + len(first.token_ids))])

    def reserve(self, num_slots: int, length: int) -> None:
        self.cache.reserve(num_slots, length)
        if self.drafter is not None:
            self.drafter.reserve(self.cache.num_slots, self.cache.capacity)


@dataclass(frozen=True)
class Course:
    """Counts of a rollout. num_read: tokens of sequences that left, which were read again."""

    steps: int
    tokens: int
    num_preemptions: int
    num_read: int

    def to_json(self) -> dict[str, float]:
        return {**vars(self), "tokens_a_step": self.tokens / self.steps, "read_again": self.num_read / self.tokens}


# ── a real engine ────────────────────────────────────────────────────────────────────────────────────────────────────


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> tuple[dict[tuple[str, int], tuple[int, ...]], Course]:
    responses = {(r.problem_id, r.sample_index): r.token_ids for r in engine.generate(requests)}
    stats = engine.stats
    return responses, Course(stats.num_steps, stats.num_tokens, stats.num_preemptions, stats.num_reread_tokens)


def run_engines(budget_tokens: int) -> list[dict[str, Any]]:
    """Returns what the recipe's model does with the long-tail workload, in float64. budget_tokens: that the caches hold."""
    model = load_model(RECIPE / "base")
    drafter = load_stored(RECIPE / "drafter", model)
    workload = read_workload(RECIPE / "longtail.json")
    requests = workload.requests[SOME]
    rows: list[dict[str, Any]] = []
    expected: dict[tuple[str, int], tuple[int, ...]] = {}
    for storage, speculation in (("ample", "off"), *((s, way) for way in ("off", "4x1x4") for s in ("rectangle", "pages"))):
        settings = EngineSettings(speculation, dtype=torch.float64, max_batch_size=len(requests))
        engine = build_engine(model.config, model.tensors, settings, drafter)
        num_bytes = engine.memory.slot_bytes(budget_tokens)
        if storage != "ample":
            engine.memory._cache_bytes = partial(int, num_bytes)
        if storage == "pages":
            engine.memory = PagedMemory(engine.memory, engine.scheduler, PAGE)
        responses, course = generate(engine, requests)
        expected = expected or responses
        assert responses == expected, f"{storage}, {speculation}: other tokens"
        rows.append({"storage": storage, "speculation": speculation, **course.to_json()})
        if speculation == "off" and storage != "ample":
            lengths = [len(expected[r.problem_id, r.sample_index]) for r in requests]
            prompts = [len(r.prompt_ids) for r in requests]
            simulated = simulate(model.config, torch.float64, prompts, lengths, num_bytes, PAGE if storage == "pages" else None)
            assert simulated == course, f"{storage}: {simulated} for {course}"
        print(rows[-1], flush=True)
    return rows


# ── the same without a model ─────────────────────────────────────────────────────────────────────────────────────────


def simulate(
    config: ModelConfig, dtype: torch.dtype, prompts: Sequence[int], lengths: Sequence[int], num_bytes: int, block: int | None
) -> Course:
    """Returns what an engine without drafts would do, step by step as RolloutEngine.step does. block: tokens of a page; None: a
    rectangle."""
    window = config.max_positions
    scheduler = Scheduler(len(lengths), window)
    cache = Cache(config, config.num_layers, dtype, torch.device("meta"), len(lengths))
    memory = CacheMemory(cache, window, lambda: num_bytes)
    if block is not None:
        memory = PagedMemory(memory, scheduler, block)
    requests = [
        Request(str(i), 0, (0,) * prompt, SamplingParams(max_tokens=length))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    scheduler.add(requests)
    steps = tokens = num_preemptions = num_read = 0
    while not scheduler.is_idle:
        running = scheduler.running
        while len(running) > 1 and not memory.has_room(len(running), scheduler.longest):
            slot = scheduler.cheapest()
            request = running[slot].to_request()
            scheduler.remove(slot)
            scheduler.waiting.appendleft(request)
            num_preemptions += 1
            num_read += len(request.prompt_ids) + len(request.token_ids) - 1
        admissions = scheduler.admit(memory.fits_longer)
        if admissions:
            if sum(len(admission.slots) for admission in admissions) == len(running):
                cache.release()
            memory.reserve(len(running), scheduler.longest + 1)
        memory.reserve(len(running), scheduler.longest)
        steps, tokens = steps + 1, tokens + len(running)
        for sequence in running:
            sequence.extend((0,), (0.0,))
        for slot in reversed(range(len(running))):
            if running[slot].finish_reason is not None:
                scheduler.remove(slot)
    return Course(steps, tokens, num_preemptions, num_read)


def run_large(config: ModelConfig, gibs: Sequence[float]) -> list[dict[str, Any]]:
    """Returns the course of a rollout by the budget of a large model's caches. The lengths are the long-tail workload's, made
    longer up to 32k tokens."""
    workload = read_workload(RECIPE / "longtail.json")
    factor = LONGEST / max(workload.lengths)
    lengths = [min(round(length * factor), config.max_positions - 200) for length in workload.lengths]
    rows = []
    for gib in gibs:
        for name, block in (("rectangle", None), ("pages of 128", 128), ("pages of 16", 16)):
            course = simulate(config, torch.bfloat16, [200] * len(lengths), lengths, int(gib * GIB), block)
            rows.append({"gib": gib, "storage": name, **course.to_json()})
            print(rows[-1], flush=True)
    return rows


def to_markdown(report: dict[str, Any]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        again = f"{row['read_again']:.0%}"
        return [f"{row['steps']:,}", f"{row['tokens_a_step']:.1f}", f"{row['num_preemptions']:,}", again]

    counts = ["engine steps", "tokens a step", "sequences that left", "tokens read again"]
    real = [[row["storage"], row["speculation"], *cells(row)] for row in report["real"]]
    large = [[f"{row['gib']:g}", row["storage"], *cells(row)] for row in report["large"]]
    words = (
        f"The recipe's model in float64, {SOME.stop - SOME.start} responses of the long-tail workload, caches for"
        f" {report['budget_tokens']:,} tokens. All say the same tokens. Pages, of {PAGE} tokens, are decisions alone: their"
        " storage had no bound."
    )
    others = (
        f"Without a model: {report['num_large']} responses with the lengths of that workload, made longer up to {LONGEST:,}"
        f" tokens, and {report['token_bytes']:,} bytes a token, those of Qwen2.5-7B in bf16; no drafts."
    )
    return "\n\n".join(
        [
            "# Caches as rectangles beside caches in pages", *provenance(report), words,
            table(["storage", "speculation", *counts], real), others, table(["GiB", "storage", *counts], large),
        ]
    ) + "\n"  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-tokens", type=int, default=2560)
    parser.add_argument("--model", type=Path, default=Path("tests/unit/published_configs/Qwen2.5-7B.json"))
    parser.add_argument("--gib", default="2,4,8,16")
    parser.add_argument("--out", type=Path, required=True, help="without its ending: .json and .md are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = parse_config(json.loads(options.model.read_text()), str(options.model))
    report = {
        "command": "python -m benchmarks.scale.rectangles",
        "environment": environment(),
        "budget_tokens": options.budget_tokens,
        "num_large": len(read_workload(RECIPE / "longtail.json").lengths),
        "token_bytes": 2 * config.num_kv_heads * config.head_dim * config.num_layers * torch.bfloat16.itemsize,
        "large": run_large(config, [float(gib) for gib in options.gib.split(",")]),
        "real": run_engines(options.budget_tokens),
    }
    write_report(options.out, report, to_markdown(report))


if __name__ == "__main__":
    main()

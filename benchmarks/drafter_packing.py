"""Drafter training on packed and on padded batches of long-tailed responses: the same sequences, optimizer and code.

    packed            one after the other, block-causal, positions restart       every token is a real one
    padded            each up to the longest of its batch                        as most trainers have it
    padded, sorted    the same after sorting all sequences by length             the best that padding can do

    taskset -c 1 python -m benchmarks.drafter_packing recipes/countdown --out benchmarks/results/drafter-packing

Speeds are real tokens per CPU second of one thread, so that another process on the core does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.longtail import LengthShape, read_workload
from tlt.bench.report import environment
from tlt.drafter.formats.folder import choose_preset, load_drafter
from tlt.drafter.model import DraftModel
from tlt.drafter.training.buffer import PackedBatch
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.models.hf_config import load_model_config
from tlt.models.hf_weights import load_tensors
from tlt.models.packed import PackedTransformer


def make_batch(lengths: Sequence[int], padded_to: int | None, size: int, vocab_size: int) -> PackedBatch:
    """Random tokens and features: the cost depends on neither. Padding has weight 0."""
    stored = [padded_to or length for length in lengths]
    weight_M = torch.cat([(torch.arange(s - 1) < length - 1).float() for s, length in zip(stored, lengths, strict=True)])
    return PackedBatch(torch.randint(vocab_size, (sum(stored),)), torch.randn(sum(stored), size), tuple(stored), weight_M)


def split(lengths: Sequence[int], batch_size: int) -> Iterator[Sequence[int]]:
    return (lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size))


def tokens_per_second(trainer: DrafterTrainer, batches: Sequence[PackedBatch], num_tokens: int) -> float:
    start = time.process_time()
    for batch in batches:
        trainer.step(batch)
    return num_tokens / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--num-sequences", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = load_model_config(options.recipe / "base")
    target = PackedTransformer(config, torch.float32)
    target.load(load_tensors(options.recipe / "base", config), version=0)
    stored = load_drafter(options.recipe / "drafter", config)
    model = DraftModel(stored.config)
    model.load_state_dict(stored.tensors)
    trainer = DrafterTrainer(model, target, choose_preset(None, stored))
    lengths = list(read_workload(options.recipe / "longtail.json").lengths)
    random.Random(0).shuffle(lengths)
    lengths = lengths[: options.num_sequences]

    rows = []
    for batch_size in options.batch_sizes:
        arms = {}
        for name, order in (("packed", lengths), ("padded", lengths), ("padded, sorted", sorted(lengths))):
            groups = list(split(order, batch_size))
            arms[name] = [
                make_batch(g, None if name == "packed" else max(g), config.hidden_size, config.vocab_size) for g in groups
            ]
        speeds: dict[str, list[float]] = {name: [] for name in arms}
        for round_ in range(options.rounds + 1):
            for name, batches in arms.items():
                speed = tokens_per_second(trainer, batches if round_ else batches[:1], sum(lengths))
                if round_:  # the first only warms up
                    speeds[name].append(speed)
        padding = {name: sum(sum(b.lengths) for b in batches) / sum(lengths) for name, batches in arms.items()}
        rows.append({"batch_size": batch_size, "tokens_per_cpu_second": speeds, "stored_tokens_per_real_token": padding})

    about: dict[str, Any] = {"environment": environment(), "lengths": str(LengthShape.of(lengths)), "num_tokens": sum(lengths)}
    options.out.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    lines = ["# Packed and padded batches", ", ".join(f"{k} {v}" for k, v in about["environment"].items() if v)]
    lines.append(f"{len(lengths)} responses, {about['lengths']}; real tokens per CPU second of one thread, median of rounds.")
    table = "| sequences per batch | packed | padded | padded, sorted | packed / padded |\n|---|---|---|---|---|"
    for row in rows:
        packed, padded, ordered = (sorted(v)[len(v) // 2] for v in row["tokens_per_cpu_second"].values())
        table += f"\n| {row['batch_size']} | {packed:,.0f} | {padded:,.0f} | {ordered:,.0f} | {packed / padded:.2f} |"
    options.out.with_suffix(".md").write_text("\n\n".join([*lines, table]) + "\n")
    print(table)


if __name__ == "__main__":
    main()

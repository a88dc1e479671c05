"""Captured against recomputed features: what a rank that falls idle can train on in so many seconds.

A step as on a rank that runs dry early: the shorter half of the long-tailed responses is its own, the 8 longest come from the
step before and have to be recomputed either way. Tokens are random: the cost depends on lengths alone.

    taskset -c 1 python -m benchmarks.drafter_features recipes/countdown --out benchmarks/results/drafter-features

Seconds are CPU seconds of one thread, so that another process on the core does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.longtail import read_workload
from tlt.bench.report import environment
from tlt.drafter.drafting.history import FeatureHistory
from tlt.drafter.formats.folder import choose_preset, load_drafter
from tlt.drafter.model import DraftModel
from tlt.drafter.training.buffer import TrajectoryBuffer
from tlt.drafter.training.spot import SpotTrainer
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.models.hf_config import load_model_config
from tlt.models.hf_weights import load_tensors
from tlt.models.packed import PackedTransformer
from tlt.types import Rollout

NUM_CARRIED = 8
NUM_PROMPT = 12


def make_rollout(length: int, index: int, vocab_size: int) -> Rollout:
    tokens = tuple(random.Random(index).choices(range(vocab_size), k=NUM_PROMPT + length))
    return Rollout(f"p{index}", 0, tokens[:NUM_PROMPT], tokens[NUM_PROMPT:], (0.0,) * length, "stop", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.0, 3.0, 10.0])
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = load_model_config(options.recipe / "base")
    target = PackedTransformer(config, torch.float32)
    target.load(load_tensors(options.recipe / "base", config), version=0)
    stored = load_drafter(options.recipe / "drafter", config)
    lengths = sorted(read_workload(options.recipe / "longtail.json").lengths)
    own = [make_rollout(n, i, config.vocab_size) for i, n in enumerate(lengths[: len(lengths) // 2])]
    carried = [make_rollout(n, 1000 + i, config.vocab_size) for i, n in enumerate(lengths[-NUM_CARRIED:])]

    def train(mode: str, seconds: float) -> dict[str, Any]:
        model = DraftModel(stored.config)
        model.load_state_dict(stored.tensors)
        trainer = DrafterTrainer(model, target, choose_preset(None, stored))
        spot = SpotTrainer(trainer, TrajectoryBuffer(2**30), 1024, keeps_captured=mode == "captured")
        for rollout in carried:
            spot.add(rollout, None)
        for rollout in own:
            spot.add(rollout, torch.randn(NUM_PROMPT + len(rollout.token_ids) - 1, config.hidden_size))
        spot.step_seconds = 1e9  # micro-steps of full size
        start = time.process_time()
        report = spot.run(lambda: time.process_time() - start >= seconds)
        spent = time.process_time() - start
        return {
            "features": mode,
            "idle_seconds": seconds,
            "trained_per_second": report.num_tokens / spent,
            "captured_share": report.captured_tokens / max(report.num_tokens, 1),
            "recomputed": report.recomputed_tokens,
        }

    train("captured", 0.5)  # warm up
    rows = [train(mode, seconds) for seconds in options.seconds for mode in ("captured", "recomputed")]

    history = FeatureHistory(config.hidden_size, 4096, 1, torch.float32, torch.device("cpu"))
    history.write([0], [0], torch.randn(1, max(lengths), config.hidden_size))
    start = time.process_time()
    for _ in range(20):
        for rollout in own:
            history.read([0], [0], len(rollout.token_ids))
    num_own = sum(len(rollout.token_ids) for rollout in own)
    capture = (time.process_time() - start) / 20 / num_own

    about: dict[str, Any] = {"environment": environment(), "own_tokens": num_own, "capture_seconds_per_token": capture}
    about["carried_tokens"] = sum(len(rollout.token_ids) for rollout in carried)
    options.out.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    lines = ["# Captured and recomputed features", ", ".join(f"{k} {v}" for k, v in about["environment"].items() if v)]
    lines.append(
        f"{len(own)} responses of this step, {num_own:,} tokens; {NUM_CARRIED} carried over, {about['carried_tokens']:,}. "
        f"Capturing costs {capture * 1e6:.2f} µs per token. CPU seconds of one thread."
    )
    table = "| idle seconds | features | tokens trained per second | of them captured | recomputed |\n|---|---|---|---|---|"
    for row in rows:
        table += f"\n| {row['idle_seconds']:g} | {row['features']} | {row['trained_per_second']:,.0f} "
        table += f"| {row['captured_share']:.0%} | {row['recomputed']:,} |"
    options.out.with_suffix(".md").write_text("\n\n".join([*lines, table]) + "\n")
    print(table)


if __name__ == "__main__":
    main()

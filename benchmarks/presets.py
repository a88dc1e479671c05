"""The three presets on the same responses with the same CPU time: what a token of training costs, and what it brings.

    python -m benchmarks.presets recipes/countdown/base --responses responses.jsonl --prompts problems.jsonl --seconds 150 \
        --out benchmarks/results/presets

Each preset starts from random weights; its learning rate warms up for a twentieth of the time and falls to 2 % in the second
half. Seconds are processor seconds of one thread, so that another process on the core does not count. Accept lengths are of
chains on the prompts' responses, speeds over off are measured in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tlt.bench.acceptance import observe, speedup
from tlt.bench.report import environment, provenance, ratio_text, table, write_report
from tlt.build.model import load_model
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.drafter.response_files import read_responses
from tlt.drafter.training.buffer import TrajectoryBuffer
from tlt.drafter.training.losses import PRESETS, Preset
from tlt.drafter.training.spot import FeatureRecompute
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.files import read_jsonl
from tlt.models.packed import PackedTransformer
from tlt.models.prompts import encode_prompts
from tlt.types import Request, Rollout, SamplingParams


@dataclass(frozen=True)
class Trained:
    """A preset's drafter. `microseconds`: per trained token."""

    drafter: StoredDrafter
    num_tokens: int
    microseconds: float


def train(preset: Preset, target: PackedTransformer, rollouts: Sequence[Rollout], options: argparse.Namespace) -> Trained:
    model = DraftModel(drafter_shape(target.config, preset.method)).initialize(0)
    trainer = DrafterTrainer(model, target, preset, options.learning_rate)
    buffer = TrajectoryBuffer(max_bytes=2**40)
    for rollout in rollouts:
        buffer.add(rollout)
    while (trajectory := buffer.missing(target.version)) is not None:
        recompute = FeatureRecompute(target, trainer.capture, trajectory)
        while not recompute.advance(1024):
            pass
    spent = 0.0
    while spent < options.seconds:
        share = spent / options.seconds
        for group in trainer.optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, share / 0.05 + 0.1, (1.0 - share) / 0.5 + 0.02)
        start = time.process_time()
        batch = buffer.sample(options.tokens_per_step)
        assert batch is not None, "every trajectory has features"
        trainer.step(batch)
        spent += time.process_time() - start
    drafter = StoredDrafter(model.config, model.state_dict(), {"preset": preset.name})
    return Trained(drafter, trainer.num_tokens, spent / trainer.num_tokens * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--responses", type=Path, required=True, help="to train on, of tlt generate")
    parser.add_argument("--prompts", type=Path, required=True, help="to measure on, of tlt task")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--tokens-per-step", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    model = load_model(options.model)
    config, tokenizer = model.config, model.tokenizer
    target = PackedTransformer(config, torch.float32)
    target.load(model.tensors, version=0)
    rollouts = read_responses(options.responses, vocab_size=config.vocab_size, window=config.max_positions)
    records = read_jsonl(options.prompts, "--prompts")
    prompts = encode_prompts(records, tokenizer, vocab_size=config.vocab_size, window=config.max_positions)
    params = SamplingParams(max_tokens=options.max_tokens, stop_ids=model.stop_ids)
    rows, measured = [], []
    for preset in PRESETS.values():
        trained = train(preset, target, rollouts, options)
        record: dict[str, Any] = {"preset": asdict(preset), "tokens": trained.num_tokens, "microseconds": trained.microseconds}
        for temperature in (0.0, 1.0):
            requests = [Request(p.problem_id, 0, p.prompt_ids, replace(params, temperature=temperature)) for p in prompts]
            acceptance = observe(model, trained.drafter, requests, options.depth, 16)
            record[f"accept_length_at_{temperature:g}"] = acceptance.accept_length
            record[f"accept_by_depth_at_{temperature:g}"] = acceptance.by_position
        few = requests[: max(len(requests) // 8, 1)]
        ratio, _ = speedup(model, trained.drafter, few, options.depth, 1, options.rounds)
        record["over_off_at_batch_1"] = asdict(ratio)
        measured.append(record)
        rows.append(
            (
                preset.name,
                f"{trained.num_tokens:,}",
                f"{trained.microseconds:.0f}",
                f"{record['accept_length_at_0']:.2f}",
                f"{record['accept_length_at_1']:.2f}",
                ratio_text(record["over_off_at_batch_1"]),
            )
        )
        print(rows[-1], flush=True)
    columns = ("preset", "tokens trained", "µs per token", "accept length, T = 0", "T = 1", "speed over off, batch 1")
    command = (
        f"python -m benchmarks.presets MODEL --responses ({len(rollouts)} responses) --prompts ({len(prompts)} problems)"
        f" --seconds {options.seconds:g} --tokens-per-step {options.tokens_per_step} --depth {options.depth}"
    )
    report = {"command": command, "environment": environment(), "presets": measured}
    write_report(options.out, report, "\n".join(["# Presets", "", *provenance(report), "", table(columns, rows), ""]))


if __name__ == "__main__":
    main()

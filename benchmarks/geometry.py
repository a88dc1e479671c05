"""Measures what a step costs in a real model's shape: drafting, verification and sampling apart, by batch size.

    python -m benchmarks.geometry --out RESULT          # writes RESULT.json and RESULT.md

Weights are random and acceptance is simulated (every draft is accepted with one probability), so nothing is said about
how good a drafter is; only what the engine pays for each part of a step, where a vocabulary of 150,000 and matrices of
millions of weights are no longer hidden by a toy.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tlt.bench.report import environment, write_report
from tlt.build.engine import EngineSettings, build_engine
from tlt.config.drafter import DrafterSection
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.engine.reading import Read
from tlt.models.decoder import ModelConfig
from tlt.models.hf_weights import expected_shapes
from tlt.speculative.sampling import BatchParams, gumbel_noise, keys_tensor
from tlt.speculative.verify import Noise, verify
from tlt.tuning.tuner import Fixed
from tlt.types import DraftTree, Request, SamplingParams, Strategy, Verdict

SHAPES = {
    "qwen2.5-0.5b": ModelConfig(
        "qwen2", 151_936, 896, 4864, 24, 14, 2, 64, rope_theta=1e6, max_positions=4096, tie_embeddings=True
    ),
    "tiny": ModelConfig("llama", 61, 32, 64, 2, 4, 2, 8, max_positions=512, tie_embeddings=True),
}


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Normal matrices, unit norms, zero biases, by Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).mul_(0.02)
        if len(shape) > 1
        else (torch.zeros(shape) if name.endswith("bias") else torch.ones(shape))
        for name, shape in expected_shapes(config).items()
    }


class SimulatedAcceptance:
    """Draws by the law, as the engine does, and then pretends: a drafted child is accepted with probability `accept`."""

    def __init__(self, accept: float, seed: int = 0) -> None:
        self.accept, self.random = accept, random.Random(seed)

    def __call__(self, tree: DraftTree, logits_BNV: torch.Tensor, noise_BNV: Noise, params: BatchParams) -> list[Verdict]:
        verdicts = verify(tree, logits_BNV, noise_BNV, params)
        if tree.num_nodes == 1:
            return verdicts
        pretended = []
        for tokens, parents in zip(tree.tokens_BN.tolist(), tree.parents_BN.tolist(), strict=True):
            path = [0]
            for node in range(1, len(tokens)):
                if parents[node] == path[-1] and self.random.random() < self.accept:
                    path.append(node)
            committed = (*(tokens[node] for node in path[1:]), tokens[0])
            pretended.append(Verdict(committed, len(path) - 1, tuple(path), (0.0,) * len(path)))
        return pretended


class Stopwatch:
    """Seconds by part; `watch` puts itself around a callable."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[part] += time.perf_counter() - start
            return result

        return timed


def measure_step(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    strategy: Strategy,
    batch_size: int,
    num_steps: int,
    prompt_tokens: int,
    accept: float,
) -> dict[str, float]:
    """Milliseconds per step by part, and tokens per second, after two steps to warm up."""
    model = DraftModel(drafter_shape(config)).initialize(1)
    stored = StoredDrafter(model.config, model.state_dict(), {})
    settings = EngineSettings(max_batch_size=batch_size, drafting=DrafterSection(confidence_threshold=0.0))
    simulated = SimulatedAcceptance(accept, batch_size)
    engine = build_engine(config, tensors, settings, stored, tuner=Fixed(strategy), verify=simulated)
    drafter = engine.drafter
    assert drafter is not None, "a strategy was given"
    rng = random.Random(0)
    params = SamplingParams(max_tokens=config.max_positions - prompt_tokens)
    prompts = [tuple(rng.randrange(config.vocab_size) for _ in range(prompt_tokens)) for _ in range(batch_size)]
    engine.add(Request(f"p{i}", 0, prompt, params) for i, prompt in enumerate(prompts))
    for _ in range(2):
        engine.step()
    watch = Stopwatch()
    engine.noise.rows = watch.watch("noise", engine.noise.rows)  # type: ignore[method-assign]  # a stop watch around it
    drafter.propose = watch.watch("drafting", drafter.propose)  # type: ignore[method-assign]  # a stop watch around it
    target, head = engine.model, Read.logits
    target.forward_capturing = watch.watch("forward", target.forward_capturing)  # type: ignore[method-assign]  # likewise
    engine.verify = watch.watch("sampling", engine.verify)
    tokens, start = engine.stats.num_tokens, time.perf_counter()
    with patch.object(Read, "logits", watch.watch("forward", head)):
        for _ in range(num_steps):
            engine.step()
    elapsed = time.perf_counter() - start
    # noise is computed ahead in blocks that outlast these steps, so what a committed token's costs is counted instead
    num_tokens = engine.stats.num_tokens - tokens
    elapsed -= watch.seconds["noise"]
    watch.seconds["noise"] = noise_seconds(config.vocab_size) * num_tokens
    elapsed += watch.seconds["noise"]
    parts = {f"{part}_ms": watch.seconds[part] / num_steps * 1e3 for part in ("drafting", "forward", "sampling", "noise")}
    return {**parts, "step_ms": elapsed / num_steps * 1e3, "tokens_per_second": num_tokens / elapsed}


def noise_seconds(vocab_size: int, num_positions: int = 16) -> float:
    """Of one position of one sequence."""
    keys_14, positions_1T = keys_tensor([(1, 2, 3, 4)]), torch.arange(num_positions)[None]
    gumbel_noise(keys_14, positions_1T, vocab_size)
    start = time.perf_counter()
    gumbel_noise(keys_14, positions_1T, vocab_size)
    return (time.perf_counter() - start) / num_positions


def measure(
    shape: str,
    batches: Iterable[int],
    strategies: Sequence[Strategy],
    accept: float,
    num_steps: int,
    prompt_tokens: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    config = SHAPES[shape]
    tensors = random_weights(config)
    rows = []
    with torch.inference_mode():
        for batch_size in batches:
            for strategy in strategies:
                parts = measure_step(config, tensors, strategy, batch_size, num_steps, prompt_tokens, accept)
                gc.collect()  # the watched engine refers to itself, and its weights are gigabytes
                rows.append({"batch_size": batch_size, "strategy": str(strategy), **parts})
                say(f"batch {batch_size}, {strategy}: {parts['step_ms']:.0f} ms a step")
    return {
        "shape": shape,
        "simulated_acceptance": accept,
        "prompt_tokens": prompt_tokens,
        "num_steps": num_steps,
        "rows": rows,
    }


def to_markdown(report: dict[str, Any]) -> str:
    columns = ["batch", "strategy", "drafting", "forward", "sampling", "noise", "whole step", "tokens/s (simulated)"]
    lines = [
        f"# One step in the shape of {report['shape']}",
        f"`{report['command']}`",
        ", ".join(f"{key} {value}" for key, value in report["environment"].items() if value),
        f"Random weights; every draft is accepted with probability {report['simulated_acceptance']}, which is simulated. "
        f"Milliseconds per step, mean of {report['num_steps']} steps after prompts of {report['prompt_tokens']} tokens. "
        "`forward` is the target's, head included; `noise` is the law's, per committed token (computed ahead, in blocks).",
        "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns),
    ]
    for row in report["rows"]:
        parts = [f"{row[part + '_ms']:.1f}" for part in ("drafting", "forward", "sampling", "noise", "step")]
        cells = [str(row["batch_size"]), row["strategy"], *parts, f"{row['tokens_per_second']:.1f}"]
        lines[-1] += "\n| " + " | ".join(cells) + " |"
    return "\n\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.geometry", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="results go to OUT.json and OUT.md")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b", help="whose layers, widths and vocabulary")
    parser.add_argument("--batches", default="1,2,4,8", help="batch sizes")
    parser.add_argument("--strategies", default="off,2x1x2,4x1x4,3x2x6", help="off, chains and trees of a learned drafter")
    parser.add_argument("--accept", type=float, default=0.7, help="probability with which a draft is accepted, simulated")
    parser.add_argument("--steps", type=int, default=10, help="engine steps per measurement")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="length of the prompts, 2 or more")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    window = SHAPES[options.shape].max_positions
    if options.prompt_tokens < 2 or options.prompt_tokens + 40 * (options.steps + 2) > window:
        parser.error(f"--prompt-tokens {options.prompt_tokens} with --steps {options.steps} must be 2 or more and fit {window}")
    torch.set_num_threads(options.threads)
    batches = [int(word) for word in options.batches.split(",")]
    strategies = [Strategy.parse(word) for word in options.strategies.split(",")]
    amounts = (options.accept, options.steps, options.prompt_tokens)
    measured = measure(options.shape, batches, strategies, *amounts, lambda line: print(line, flush=True))
    command = " ".join(["python -m benchmarks.geometry", *sys.argv[1:]])
    report = {"command": command, "environment": environment(), **measured}
    write_report(options.out, report, to_markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

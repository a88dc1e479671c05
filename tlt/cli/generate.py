"""`tlt generate`: prompts in, responses out, one a line. Knows no sampling and no speculation: the engine does."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from tlt.cli.engine import SPECULATION, EngineOptions, SamplingOptions, generate_in_order, show_busy
from tlt.cli.options import Options
from tlt.files import Record, check_output_file, write_jsonl
from tlt.types import Rollout

if TYPE_CHECKING:
    from tlt.engine.stats import EngineStats


class Generate(Options):
    """Generate responses to prompts; speculation changes nothing but the time."""

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Hugging Face checkpoint folder of a Llama, Qwen2 or Qwen3 model."""
    prompts: Annotated[Path, arg(metavar="FILE")]
    """JSONL of prompts: prompt (text), prompt_ids or messages (chat), and optionally problem_id."""
    out: Annotated[Path, arg(metavar="FILE")]
    """JSONL to write, with one response a line."""
    speculation: Annotated[str, arg(metavar=SPECULATION)] = "off"
    """How tokens are drafted: adaptive measures and chooses at every step; 4x1x4 drafts chains of four tokens, 3x2x5 trees.
    DRAFTER is learned, ngram (retrieval from the problem's own responses) or hybrid; ngram and adaptive need no --drafter."""
    sampling: Annotated[SamplingOptions, OmitArgPrefixes] = SamplingOptions()
    """How tokens are drawn."""
    engine: Annotated[EngineOptions, OmitArgPrefixes] = EngineOptions()
    """What the engine computes with."""


def run(options: Generate) -> Record:
    """Writes one line per response, in the order of prompts and samples; returns the summary."""
    start = time.perf_counter()
    check_output_file(options.out, "--out")
    with show_busy():
        import torch

        from tlt.api import to_response
        from tlt.build import load_engine, load_model
        from tlt.models.prompts import make_requests, read_prompts

        options.engine.check(options.speculation)
        model = load_model(options.model)
    vocab_size, window = model.config.vocab_size, model.config.max_positions
    prompts = read_prompts(options.prompts, model.tokenizer, vocab_size=vocab_size, window=window)
    requests = make_requests(prompts, options.sampling.params(model.stop_ids), options.sampling.samples)

    torch.set_num_threads(options.engine.threads)
    engine = load_engine(model, options.engine.settings(options.speculation), options.engine.drafter)
    print(f"tlt: {len(requests)} responses on {engine.device}", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    rollouts = generate_in_order(engine, requests)
    seconds = time.perf_counter() - begin
    write_jsonl(options.out, (vars(to_response(rollout, model.tokenizer)) for rollout in rollouts))
    summary = summarize(rollouts, seconds, engine.stats)
    return summary | {"device": str(engine.device), "elapsed": time.perf_counter() - start}


def summarize(rollouts: Sequence[Rollout], seconds: float, stats: EngineStats) -> Record:
    """Returns the summary. seconds: of generation, without loading. accept_length is null when nothing was speculated."""
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    return {
        "responses": len(rollouts),
        "tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "accept_length": stats.accept_length,
        "accept_by_depth": stats.accept_by_depth,
        "strategy_seconds": {name: s.seconds for name, s in stats.by_strategy.items()},
        "strategy_speed": {name: s.speed for name, s in stats.by_strategy.items()},
        "strategy_predicted": {name: s.predicted_speed for name, s in stats.by_strategy.items()},
        "truncated_share": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
    }

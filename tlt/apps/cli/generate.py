"""`tlt generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tlt.apps.cli.data import NO_ENVIRONMENT, PromptOptions
from tlt.apps.cli.engine import EngineOptions, SamplingOptions, generate_in_order, longest, show_busy
from tlt.apps.cli.options import AdapterName, File, ModelName, Written
from tlt.apps.cli.summary import Summary, log, percent, written
from tlt.base.config.load import load_environment
from tlt.base.config.rollout import SpeculationKey, may_use_references
from tlt.base.io.files import Record, check_output_file, with_folder, write_jsonl
from tlt.base.io.hub import resolve_model
from tlt.base.speculation import Adaptive
from tlt.base.types import Problem, Response, Rollout, UserError, num_drawn
from tlt.training.saved.response_reader import read_references

if TYPE_CHECKING:
    from tlt.engine.stats import EngineStats
    from tlt.models.hf.prompts import EncodedPrompt
    from tlt.models.hf.tokenizer import Tokenizer


class Generate(PromptOptions, SamplingOptions, EngineOptions):
    """Generate responses to prompts; speculation changes nothing but the time."""

    model: ModelName
    """A Hugging Face checkpoint folder, or OWNER/NAME or OWNER/NAME@REVISION on the hub: a Llama, Qwen2 or
    Qwen3 model; with --engine vllm any text model that vLLM can load."""
    adapter: AdapterName = None
    """LoRA adapter that is merged into the model: a folder as PEFT saves it, or OWNER/NAME on the hub."""
    prompts: Annotated[Path, Written("DATA")]
    """Prompts: a JSONL or Parquet file, a folder of them, or a dataset of the Hugging Face hub. A row has
    prompt (text or chat messages), messages or prompt_ids, and optionally problem_id."""
    out: Annotated[Path, Written("FILE")]
    """JSONL to write, with one response a line."""
    speculation: SpeculationKey = Adaptive()
    """How tokens are drafted: off, adaptive (measured and chosen at every step, off included), or fixed:
    4x1x4 drafts chains of four tokens, 3x2x5 trees. DRAFTER is learned, ngram (retrieval from the problem's
    own responses) or hybrid (both); ngram and adaptive need no --drafter."""
    environment: Annotated[Path | None, Written("CONFIG")] = None
    """Configuration whose section [environment] answers between the model's turns: a TOML file, which may
    hold nothing else, the name of a recipe, or the folder of a run. Prompts then use the chat template."""
    references: File = None
    """Responses of an earlier tlt generate to these prompts, such as those of the model before its last
    update. With the same seed hardly a token differs, so drafts are taken from them. Needs --speculation
    adaptive, or ahead:64x1x64, which drafts from nothing else."""


def run(options: Generate) -> Record:
    start = time.perf_counter()
    check_output_file(options.out, "--out")
    if options.references is not None and options.engine == "vllm":
        raise UserError(
            "--references: with --engine vllm nothing is drafted from them; give tlt, or leave it out"
        )
    if options.references is not None and not may_use_references(options.speculation):
        told = f"with --speculation {options.speculation} nothing is drafted from them"
        raise UserError(f"--references: {told}; give adaptive or ahead:64x1x64, or leave it out")
    environment = NO_ENVIRONMENT
    if options.environment is not None:
        environment = load_environment(options.environment, "--environment")
    folder, adapter = resolve_model(options.model), options.adapter and resolve_model(options.adapter)
    with show_busy():
        import torch

        from tlt.engine.build.engine import load_engine
        from tlt.engine.build.model import load_model_for
        from tlt.models.hf.prompts import check_max_tokens, make_requests
        from tlt.training.build.environment import build_between_turns
        from tlt.training.rollout.conversations import converse

        options.check_engine(options.speculation, options.references is not None)
        model = load_model_for(folder, options.engine, adapter, options.implementation)
    vocab_size, window = model.config.vocab_size, model.config.max_positions
    file, sizes = options.prompts, {"vocab_size": vocab_size, "window": window}
    prompts = options.read_prompts(file, model.tokenizer, **sizes, environment=environment)
    if "max_tokens" in options.model_fields_set:
        check_max_tokens(prompts, options.max_tokens, window, "--max-tokens")
    params = model.with_ends(options.params(options.seed, model.stop_ids), "--stop")
    requests = make_requests(prompts, params, options.samples)

    references = None
    if options.references is not None:
        references = read_references(options.references, requests, vocab_size=vocab_size, window=window)

    torch.set_num_threads(options.threads)
    settings = options.engine_settings(options.speculation, longest(requests))
    with show_busy("starting the engine"):
        engine = load_engine(model, settings, options.drafter_folder, references=references)
    log(f"{len(requests)} responses on {engine.device}")
    begin = time.perf_counter()
    chat = options.chat_format(environment)
    between_turns = build_between_turns(environment, model.tokenizer, chat, window)
    try:
        responses = converse(engine, between_turns, map(_problem, prompts), requests)
        rollouts = generate_in_order(engine, requests, responses)
    finally:
        between_turns.close()
    seconds = time.perf_counter() - begin
    engine.close()
    write_jsonl(with_folder(options.out), (_line(rollout, model.tokenizer) for rollout in rollouts))
    summary = _summarize(rollouts, seconds, engine.stats)
    return summary | {"device": str(engine.device), "elapsed": time.perf_counter() - start}


def _line(rollout: Rollout, tokenizer: Tokenizer | None) -> Record:
    from tlt.training.saved.kept_responses import turns_of

    if tokenizer is None:
        return vars(Response.of(rollout, None))
    in_thought = {"in_thought": True} if tokenizer.is_in_thought(rollout.prompt_ids) else {}
    turns = {} if rollout.turns is None else {"turns": turns_of(rollout, rollout.turns, tokenizer.decode)}
    return vars(Response.of(rollout, tokenizer.decode)) | in_thought | turns


def _problem(prompt: EncodedPrompt) -> Problem:
    return Problem(prompt.problem_id, prompt.prompt_ids, {"problem_id": prompt.problem_id, **prompt.record})


def _summarize(rollouts: Sequence[Rollout], seconds: float, stats: EngineStats) -> Record:
    from tlt.training.rollout.result import turns_record

    num_tokens = sum(num_drawn(rollout) for rollout in rollouts)
    has_turns = any(rollout.turns is not None for rollout in rollouts)
    turns = {"turns": asdict(turns_record(rollouts, stats.num_kept_tokens))} if has_turns else {}
    return {
        "responses": len(rollouts),
        "tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "accept_length": stats.accept_length,
        "draft_acceptance_rate_pos": stats.draft_acceptance_rate_pos,
        "strategy_seconds": {name: s.seconds for name, s in stats.by_strategy.items()},
        "strategy_speed": {name: s.speed for name, s in stats.by_strategy.items()},
        "truncated_share": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
        **turns,
    }


def summarize(record: Record) -> Summary:
    responses, tokens, speed = (
        written(name, record[name]) for name in ("responses", "tokens", "tokens_per_second")
    )
    rows: Record = {"accept_length": record["accept_length"]}
    if record["draft_acceptance_rate_pos"]:
        rows["accepted by depth"] = "  ".join(map(percent, record["draft_acceptance_rate_pos"]))
    rows |= {name: record[name] for name in ("truncated_share", "device", "elapsed")}
    rows["strategies"] = [
        {"strategy": name, "time_seconds": seconds, "tokens/s": record["strategy_speed"][name]}
        for name, seconds in record["strategy_seconds"].items()
    ]
    if "turns" in record:
        rows["turns"] = record["turns"]
    time = written("seconds", record["seconds"])
    return Summary(f"{responses} responses, {tokens} tokens in {time}: {speed}", rows)

"""`tlt bench`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tlt.apps.cli.data import Data, PromptOptions
from tlt.apps.cli.engine import EngineOptions, SamplingOptions, show_busy
from tlt.apps.cli.options import AdapterName, File, Written, with_dashes
from tlt.apps.cli.serve import is_run
from tlt.apps.cli.summary import Summary, log
from tlt.base.io.files import Record, check_output_file, with_folder, write_json
from tlt.base.io.hub import resolve_model
from tlt.base.speculation import Adaptive
from tlt.base.types import UserError
from tlt.base.value_types import PositiveInt, Problems

if TYPE_CHECKING:
    from tlt.apps.bench.speculation import Subject

OF_A_RUN = {"model", "num", "rounds", "out"}


class Bench(PromptOptions, SamplingOptions, EngineOptions):
    """Measure how much faster a model or a run generates with adaptive speculation than without.

    Engines with and without it generate the same responses, in turns. A model needs --prompts; a run is
    measured with its own drafter, problems, sampling and engine.
    """

    model: Annotated[Path, Written("MODEL|RUN", is_alone=True)]
    """A Hugging Face checkpoint folder, OWNER/NAME or OWNER/NAME@REVISION on the hub; or the folder of a run
    (run.out_dir), whose last policy is measured."""
    adapter: AdapterName = None
    """LoRA adapter that is merged into the model: a folder as PEFT saves it, or OWNER/NAME on the hub."""
    prompts: Data = None
    """Prompts: a JSONL or Parquet file, a folder of them, or a dataset of the Hugging Face hub. A row has
    prompt (text or chat messages), messages or prompt_ids, and optionally problem_id."""
    num: Problems = 16
    """Number of prompts of each round; the next round takes the next ones."""
    rounds: PositiveInt = 6
    """Number of rounds: in each, the responses are generated once without speculation and once with."""
    out: File = None
    """JSON to write: the figures, and the machine they are of."""


def run(options: Bench) -> Record:
    check_output_file(options.out, "--out")
    with show_busy():
        from tlt.apps.bench.speculation import ADAPTIVE, OFF, measure
        from tlt.training.report.versions import environment

        subject = _of_run(options) if is_run(options.model) else _of_model(options)
    with show_busy("starting the engines"):
        engines = subject.engines()
    try:
        measured = measure(engines, lambda i: subject.requests(i, options.num), options.rounds, log)
    finally:
        for engine in engines.values():
            engine.close()
    turns = measured.turns
    record: Record = {
        "speedup": asdict(measured.speedup),
        "tokens_per_second": {
            name: sum(turn.num_tokens for turn in taken) / sum(turn.seconds for turn in taken)
            for name, taken in turns.items()
        },
        "accept_length": measured.stats.accept_length,
        "responses": sum(len(turn.token_ids) for turn in turns[OFF]),
        "tokens": sum(turn.num_tokens for turn in turns[OFF]),
        "num_different": measured.num_different,
        "batch_size": subject.settings.max_batch_size,
        "strategy_seconds": {name: one.seconds for name, one in measured.stats.by_strategy.items()},
        "device": str(engines[ADAPTIVE].device),
    }
    if options.out is not None:
        write_json(with_folder(options.out), record | {"environment": environment()})
    return record


def _of_model(options: Bench) -> Subject:
    if options.prompts is None:
        raise UserError("--prompts: is missing; give the prompts to answer, or the folder of a run")
    import torch

    from tlt.apps.bench.speculation import Subject
    from tlt.engine.build.engine import load_stored_drafter
    from tlt.engine.build.model import load_model_for
    from tlt.models.hf.prompts import check_max_tokens

    options.check_engine(Adaptive())
    torch.set_num_threads(options.threads)
    adapter = options.adapter and resolve_model(options.adapter)
    folder = resolve_model(options.model)
    model = load_model_for(folder, options.engine, adapter, options.implementation)
    vocab_size, window = model.config.vocab_size, model.config.max_positions
    prompts = options.read_prompts(options.prompts, model.tokenizer, vocab_size=vocab_size, window=window)
    if "max_tokens" in options.model_fields_set:
        check_max_tokens(prompts, options.max_tokens, window, "--max-tokens")
    params = model.with_ends(options.params(options.seed, model.stop_ids), "--stop")
    longest = max(len(prompt.prompt_ids) for prompt in prompts) + params.max_tokens
    return Subject(
        model,
        load_stored_drafter(options.drafter_folder, model),
        options.engine_settings(Adaptive(), longest),
        [(prompt.problem_id, prompt.prompt_ids) for prompt in prompts],
        params,
        options.samples,
    )


def _of_run(options: Bench) -> Subject:
    if theirs := sorted(options.model_fields_set - OF_A_RUN):
        has = f"{options.model} is a run, which is measured as its configuration says"
        raise UserError(f"--{with_dashes(theirs[0])}: {has}; leave it out, or give a model's folder")
    import torch

    from tlt.apps.bench.speculation import Subject
    from tlt.apps.run.served import open_served
    from tlt.engine.build.engine import load_stored_drafter
    from tlt.engine.build.model import open_model
    from tlt.training.build.layout import device_of
    from tlt.training.build.policy import master_dtype
    from tlt.training.build.problems import load_problems
    from tlt.training.build.run_engine import engine_settings

    served = open_served(options.model, None, log)
    config = served.config
    torch.set_num_threads(config.run.threads_per_rank)
    model = open_model(served.policy, master_dtype(config), None, config.model.implementation)
    return Subject(
        model,
        load_stored_drafter(served.drafter, model),
        engine_settings(config, device_of(config).name),
        [(one.problem_id, one.prompt_ids) for one in load_problems(config, "train", served.policy)],
        model.with_ends(config.sampling.params(config.run.seed, model.stop_ids)),
        config.rollout.samples_per_problem,
    )


def summarize(record: Record) -> Summary:
    one, different = record["speedup"], record["num_different"]
    told = f"{one['mean']:.2f}" + ("" if one["low"] is None else f" ({one['low']:.2f} to {one['high']:.2f})")
    told = f"speculation: {told} times as fast as without"
    if one["low"] is None or one["low"] <= 1 <= one["high"]:
        told += ", not resolved: more --rounds narrow the interval"
    rows: Record = {
        "tokens/s": "  ".join(f"{name} {speed:,.1f}" for name, speed in record["tokens_per_second"].items()),
        "tokens": f"{different} of {record['responses']} responses differ" if different else "the same",
    }
    rows |= {name: record[name] for name in ("accept_length", "responses", "batch_size", "device")}
    rows["strategies"] = [
        {"strategy": name, "time_seconds": seconds} for name, seconds in record["strategy_seconds"].items()
    ]
    return Summary(told, rows)

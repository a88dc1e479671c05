"""`tlt drafter eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tlt.apps.cli.drafter import AnswerOptions
from tlt.apps.cli.engine import DeviceOptions, show_busy
from tlt.apps.cli.options import File, Written
from tlt.apps.cli.summary import Summary, log, rounded
from tlt.base.config.drafter import DrafterSection, DraftVocabOption
from tlt.base.io.files import Record, check_output_file, with_folder, write_json
from tlt.base.io.hub import resolve_model
from tlt.base.strategy import Strategy
from tlt.base.types import Request, UserError
from tlt.base.value_types import BatchSize, MaxTokens, Temperature

if TYPE_CHECKING:
    from tlt.drafter.formats.folder import StoredDrafter
    from tlt.engine.build.model import Model
    from tlt.engine.settings import EngineSettings


class DrafterEval(AnswerOptions, DeviceOptions):
    """Measure how often a drafter's guesses are accepted, position by position.

    tlt bench measures the speed that they bring.
    """

    drafter: Annotated[Path, Written("DRAFTER", is_alone=True)]
    """Drafter of TLT or of another trainer: a folder, or OWNER/NAME on the hub."""
    model: Annotated[Path, Written("MODEL")]
    """The model that it drafts for: a Hugging Face checkpoint folder, or OWNER/NAME on the hub."""
    prompts: Annotated[Path, Written("DATA")]
    """Prompts: a JSONL or Parquet file, a folder of them, or a dataset of the Hugging Face hub. A row has
    prompt (text or chat messages), messages or prompt_ids, and optionally problem_id."""
    out: File = None
    """JSON to write, with the whole result."""
    depth: Annotated[int, Field(ge=1, le=Strategy.MAX_DEPTH)] = 3
    """Tokens of the chain that is drafted for each verification; vLLM calls it num_speculative_tokens."""
    temperature: Temperature = 0.0
    max_tokens: MaxTokens = 512
    max_batch_size: BatchSize = 8
    draft_vocab: DraftVocabOption = "auto"
    """Tokens that the drafter may propose. A number N: the N most frequent tokens, by the counts in its
    folder and in what is sampled. full: all tokens. auto: all, or fewer where the drafter's head takes a
    tenth of a forward or more."""


def evaluate(options: DrafterEval) -> Record:
    check_output_file(options.out, "--out")
    folder, drafter_folder = resolve_model(options.model), resolve_model(options.drafter)
    adapter = options.adapter and resolve_model(options.adapter)
    with show_busy():
        import torch

        from tlt.drafter.formats.folder import load_drafter
        from tlt.engine.build.model import load_model
        from tlt.engine.settings import EngineSettings

        device, dtype = options.choose_device(), options.choose_dtype()
        model = load_model(folder, adapter=adapter)
    drafter = load_drafter(drafter_folder, model.config, model.tensors)
    requests = options.requests(options.prompts, model)
    torch.set_num_threads(options.threads)
    settings = EngineSettings(
        dtype=dtype,
        device=device,
        max_batch_size=options.max_batch_size,
        drafting=DrafterSection(vocabulary=options.draft_vocab),
    )
    log(f"{len(requests)} responses on {device}")
    with show_busy(f"answering {len(requests)} prompts"):
        acceptance = measure_chains(model, drafter, options.depth, settings, requests)
    summary: Record = {
        "form": drafter.config.method,
        "depth": options.depth,
        "temperature": options.temperature,
        "responses": len(requests),
        **acceptance,
        "device": str(device),
    }
    if options.out is not None:
        write_json(with_folder(options.out), summary)
    return summary


def measure_chains(
    model: Model, drafter: StoredDrafter, depth: int, settings: EngineSettings, requests: Sequence[Request]
) -> Record:
    """Measures the acceptance of chains of `depth` guesses. Raises UserError where prompts and responses are
    too short for any guess."""
    from tlt.engine.build.engine import build_engine, build_learned
    from tlt.speculation.tuner.tuner import FixedTuner

    tuner = FixedTuner(Strategy("learned", depth, 1, depth))
    engine = build_engine(model.config, model.tensors, settings, tuner=tuner)
    learned = build_learned(engine, drafter, settings)
    engine.load_drafter(learned)
    for _ in engine.generate(requests):
        pass
    stats = engine.stats
    if stats.accept_length is None:
        remedy = "give prompts of two tokens or more, or let responses be longer"
        raise UserError(f"drafter eval: not one guess was verified; {remedy}")
    return {
        "num_verifications": stats.num_verifications,
        "accept_length": stats.accept_length,  # tokens per verification, the target's own included
        "by_position": stats.draft_acceptance_rate_pos,  # unconditional, as in vLLM
        "draft_vocab": learned.model.num_proposed,
    }


def summarize(record: Record) -> Summary:
    names = "form", "depth", "temperature", "responses", "num_verifications", "draft_vocab", "device"
    rows: Record = {name: record[name] for name in names}
    rows["all guesses accepted up to this position"] = [
        {"position": position, "accepted_share": share}
        for position, share in enumerate(record["by_position"], start=1)
    ]
    return Summary(f"accept length {rounded(record['accept_length'])}", rows)

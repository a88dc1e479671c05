"""What `tlt drafter export` and `tlt drafter eval` do. Values in, a summary out, as in commands.py.

drafter/ ──export──▶ a directory that vLLM or SGLang serves
         └─eval────▶ how often its guesses are accepted, where, and what that is worth here
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tlt.files import Record, check_output_file, write_atomically
from tlt.types import Request, SamplingParams, Strategy, UserError


@dataclass(frozen=True)
class ExportOptions:
    drafter: Path
    to: Path
    format: str
    target: Path


def export(options: ExportOptions, warn: Callable[[str], None]) -> Record:
    """Writes the new folder `options.to` (see drafting/formats.py). `warn` hears of weights that do not belong together."""
    from tlt.drafter.folder import load_drafter
    from tlt.drafter.formats import FORMATS, Target, export_drafter, mismatch
    from tlt.models.hf_config import config_to_hf, load_model_config
    from tlt.models.hf_weights import content_hash, load_tensors

    if options.to.exists():
        raise UserError(f"--to: {options.to} exists; give the name of a new folder")
    check_output_file(options.to, "--to")
    config = load_model_config(options.target)
    tensors = load_tensors(options.target, config)
    drafter = load_drafter(options.drafter, config, tensors)
    (architecture,) = config_to_hf(config, drafter.tensors["fc.weight"].dtype)["architectures"]
    head_VE = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    target = Target(str(options.target), architecture, head_VE, content_hash(tensors))
    if (warning := mismatch(drafter, target)) is not None:
        warn(warning)
    export_drafter(drafter, options.format, target, options.to)
    return {"format": options.format, "engine": FORMATS[options.format].engine, "out": str(options.to)}


@dataclass(frozen=True)
class EvalOptions:
    """Everything `tlt drafter eval` depends on. rounds: of the timing; 0 leaves it out."""

    drafter: Path
    model: Path
    prompts: Path
    out: Path | None
    depth: int
    temperature: float
    samples: int
    max_tokens: int
    seed: int
    max_batch_size: int
    rounds: int
    threads: int


def evaluate(options: EvalOptions) -> Record:
    """Generates responses to the prompts with chains of `depth` guesses; what became of the guesses (bench/acceptance.py)."""
    import torch

    from tlt.bench.acceptance import observe, speedup
    from tlt.drafter.folder import load_drafter
    from tlt.models.hf_config import load_model_config
    from tlt.models.hf_weights import load_tensors
    from tlt.models.prompts import read_prompts
    from tlt.models.tokenizer import has_tokenizer, load_tokenizer, read_stop_ids

    _check_eval(options)
    config = load_model_config(options.model)
    policy = load_tensors(options.model, config)
    drafter = load_drafter(options.drafter, config, policy)
    tokenizer = load_tokenizer(options.model) if has_tokenizer(options.model) else None
    stop_ids = tokenizer.stop_ids if tokenizer is not None else read_stop_ids(options.model)
    prompts = read_prompts(options.prompts, tokenizer, vocab_size=config.vocab_size, window=config.max_positions)
    params = SamplingParams(
        temperature=options.temperature, max_tokens=options.max_tokens, stop_ids=stop_ids, seed=options.seed
    )
    requests = [
        Request(prompt.problem_id, sample_index, prompt.prompt_ids, params, purpose="generate")
        for prompt in prompts
        for sample_index in range(options.samples)
    ]
    torch.set_num_threads(options.threads)
    acceptance = observe(config, policy, drafter, requests, options.depth, options.max_batch_size)
    summary: Record = {
        "form": drafter.config.method,
        "depth": options.depth,
        "temperature": options.temperature,
        "responses": len(requests),
        **asdict(acceptance),
    }
    if options.rounds:
        ratio, num_different = speedup(config, policy, drafter, requests, options.depth, options.max_batch_size, options.rounds)
        summary["speedup"] = asdict(ratio) | {"batch_size": options.max_batch_size, "num_different": num_different}
    if options.out is not None:
        with write_atomically(options.out) as file:
            json.dump(summary, file, indent=1)
    return summary


def _check_eval(options: EvalOptions) -> None:
    counts = {"depth": options.depth, "samples": options.samples, "threads": options.threads}
    for name, value in {**counts, "max-batch-size": options.max_batch_size}.items():
        if value < 1:
            raise UserError(f"--{name}: is {value}; it must be 1 or more")
    if options.rounds < 0:
        raise UserError(f"--rounds: is {options.rounds}; it must be 0 (no timing) or more")
    Strategy("learned", options.depth, 1, options.depth)
    if options.out is not None:
        check_output_file(options.out, "--out")

"""`tlt audit`: the responses to judge, and the verdict in print; apps/audit/ judges."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from tlt.apps.audit.server import Answers, Endpoint, complete, read_api_key
from tlt.apps.cli.data import Data, PromptOptions
from tlt.apps.cli.engine import (
    SPECULATION,
    EngineOptions,
    SamplingOptions,
    generate_in_order,
    longest,
    show_busy,
)
from tlt.apps.cli.options import File, ModelName, Names, Switch, Written
from tlt.apps.cli.summary import Ended, Summary
from tlt.base.config.mistakes import mistake
from tlt.base.io.files import Record, check_output_file, get_id, read_jsonl, with_folder, write_json
from tlt.base.io.hub import resolve_model
from tlt.base.io.secrets import hide
from tlt.base.io.text import visible
from tlt.base.kinds import MaxTokens, Problems, Samples, Share, shorten
from tlt.base.types import Request, Rollout, SamplingParams, UserError, resolve_dtype

if TYPE_CHECKING:
    from tlt.apps.audit.referee import Referee
    from tlt.apps.audit.report import AuditReport
    from tlt.models.hf.tokenizer import Tokenizer


EXIT_CODES = {"lossless": 0, "undecided": 3, "not lossless": 1}
SEVERITY = tuple(EXIT_CODES)


class Audit(PromptOptions, SamplingOptions, EngineOptions):
    """Judge whether an engine samples from the model's own probabilities.

    The engine is TLT's, in each mode of --speculation; or the one that made --responses; or the server at
    --url.

    Its tokens are tested against the probabilities that transformers computes.

    Exit code 0: lossless; 1: not lossless; 3: undecided, for want of tokens or because an estimate speaks
    against the engine. --few-tokens-pass makes want of tokens 0, too.
    """

    model: ModelName
    """The model that the engine should follow: a Hugging Face checkpoint folder, or OWNER/NAME on the hub."""
    prompts: Data = None
    """Prompts: a JSONL or Parquet file, a folder of them, or a dataset of the Hugging Face hub. A row has
    prompt (text or chat messages), messages or prompt_ids, and optionally problem_id."""
    task: Annotated[str | None, Written("NAME")] = None
    """A task, such as countdown, whose test problems are answered instead of --prompts."""
    num: Problems = 64
    """Number of problems of --task to answer."""
    responses: File = None
    """JSONL of another engine's responses to judge, with prompt_ids and token_ids. Give all of its responses,
    not a selection."""
    url: Annotated[str | None, Written("URL")] = None
    """An OpenAI-compatible server to judge, such as http://localhost:8000/v1, with --max-batch-size
    requests in flight."""
    engine_model: Annotated[str | None, Written("NAME")] = None
    """The name by which the server at --url serves the model."""
    api_key_variable: Annotated[str | None, Written("NAME")] = None
    """Environment variable with the API key of the server at --url, such as OPENAI_API_KEY; default: no key
    is sent."""
    speculation: Annotated[Names, Written(SPECULATION + "[,...]")] = ("off",)
    """Modes of TLT's engine, each judged alone: off, adaptive, or a fixed shape such as 4x1x4 (chains of
    four tokens)."""
    plant_fault: Annotated[Share, Written("PROBABILITY")] = 0.0
    """Probability with which TLT's engine accepts a rejected draft, to show that the audit finds such a
    fault."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Largest probability with which a lossless engine is judged not lossless."""
    tolerance: Share = 1e-3
    """Nats by which rounding may move a log-probability; at temperature 0, the gap up to which two tokens are
    tied."""
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = "float32"
    referee_dtype: Literal["float32", "float64"] = "float32"
    """Number type of the model in transformers, which runs on the CPU."""
    few_tokens_pass: Switch = False
    """Exits with 0 also where nothing speaks against the engine, but the tokens are too few to call it
    lossless."""
    out: File = None
    """JSON to write, with the complete reports."""
    samples: Samples = 8
    max_tokens: MaxTokens = 512

    @model_validator(mode="after")
    def _names_one_engine(self) -> Audit:
        if self.stop:
            raise mistake(
                "--stop: ends responses by their text, where the audit knows tokens alone; leave it out"
            )
        if self.responses is not None and self.url is not None:
            raise mistake("--responses and --url: name two engines; give one of them")
        if self.responses is None and (self.prompts is None) == (self.task is None):
            raise mistake(
                "--prompts: give the prompts to answer, as --prompts FILE or --task NAME, one of the two"
            )
        for name, value in (("--responses", self.responses), ("--url", self.url)):
            if value is not None and (self.speculation != ("off",) or self.drafter or self.plant_fault):
                raise mistake(
                    f"{name}: {value} is another engine; leave --speculation, --drafter and --plant-fault out"
                )
        if self.plant_fault and self.engine == "vllm":
            raise mistake("--plant-fault: is for engine tlt; vLLM verifies for itself")
        if (self.url is None) != (self.engine_model is None):
            both = "the server's address and the name it serves the model by"
            raise mistake(f"--url and --engine-model belong together: {both}")
        if (variable := self.api_key_variable) is not None and self.url is None:
            raise mistake(
                f"--api-key-variable: {variable} is for the server at --url; give it, or leave it out"
            )
        if self.responses is not None and (self.prompts is not None or self.task is not None):
            raise mistake("--responses: the file holds its prompts itself; leave --prompts and --task out")
        if len(set(self.speculation)) < len(self.speculation):
            raise mistake(f"--speculation: {','.join(self.speculation)!r} must name every mode once")
        if self.plant_fault and set(self.speculation) == {"off"}:
            needs = "--speculation DEPTHxWIDTHxBUDGET and --drafter DIR"
            raise mistake(f"--plant-fault: is a fault of speculation; give {needs}")
        return self


def run(options: Audit) -> Ended:
    """Returns the exit code of the worst verdict."""
    if options.out is not None:
        check_output_file(options.out, "--out")
    if options.api_key_variable is not None:
        read_api_key(options.api_key_variable)  # refused before anything is loaded
    folder = resolve_model(options.model)
    with show_busy():
        import torch

        from tlt.apps.audit.referee import Referee
        from tlt.apps.audit.verdict import Auditor
        from tlt.models.hf.tokenizer import check_stop_ids, has_tokenizer, load_tokenizer, read_stop_ids

        for speculation in options.speculation:
            options.check_engine(speculation)
        torch.set_num_threads(options.threads)
        referee = Referee(folder, resolve_dtype(options.referee_dtype))
        tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    stop_ids = tokenizer.stop_ids if tokenizer is not None else read_stop_ids(folder)
    params = options.params(options.seed, stop_ids)
    check_stop_ids(params, referee.vocab_size, "--stop")
    reports = []
    for mode, answers in _modes(options, params, referee, tokenizer):
        if answers.num_missing:
            asked = len(answers.rollouts) + answers.num_missing
            print(
                f"tlt: {answers.num_missing} of {asked} responses are missing, the others are judged: "
                f"{hide(visible(answers.why))}",
                file=sys.stderr,
                flush=True,
            )
        auditor = Auditor(
            params,
            referee.vocab_size,
            referee.window,
            alpha=options.alpha,
            tolerance=options.tolerance,
            limit=None if options.responses is not None else params.max_tokens,
            seed=params.seed,
        )
        report = _explained(auditor.judge(mode, answers.rollouts, referee), options)
        report = replace(report, num_missing=answers.num_missing)
        if tokenizer is not None:
            report = report.with_texts(lambda token_id: str(tokenizer.hf.convert_ids_to_tokens(token_id)))
        reports.append(report)
        _print_report(report)
    if options.out is not None:
        _write_reports(options, options.out, reports)
    worst = max(reports, key=lambda report: SEVERITY.index(report.verdict))
    modes = {one.mode: {"lossless": one.is_lossless, "log10_e": one.max_log10_e} for one in reports}
    summary: Record = {"lossless": worst.is_lossless, "modes": modes}
    if options.responses is None and options.url is None:
        summary["device"] = str(options.choose_device())
    passes = options.few_tokens_pass and all(one.is_lossless or one.has_no_evidence for one in reports)
    return Ended(summary, 0 if passes else EXIT_CODES[worst.verdict])


# ------------------------------------------------------------------------------------------------------------
# The responses


def _modes(
    options: Audit, params: SamplingParams, referee: Referee, tokenizer: Tokenizer | None
) -> Iterator[tuple[str, Answers]]:
    """Yields each engine's name and responses."""
    if options.responses is not None:
        yield options.responses.name, Answers(_read_responses(options.responses, referee))
        return
    from tlt.models.hf.prompts import encode_prompts, make_requests
    from tlt.tasks.base import make_problems

    vocab_size, window = referee.vocab_size, referee.window
    if options.prompts is not None:
        prompts = options.read_prompts(options.prompts, tokenizer, vocab_size=vocab_size, window=window)
    else:
        assert options.task is not None
        problems = make_problems(options.task, options.num, params.seed, {"split": "test"})
        records = [(f"task {options.task}", problem) for problem in problems]
        prompts = encode_prompts(records, tokenizer, vocab_size=vocab_size, window=window)
    requests = make_requests(prompts, params, options.samples)
    if options.url is not None:
        assert options.engine_model is not None
        key = None if options.api_key_variable is None else read_api_key(options.api_key_variable)
        server = Endpoint(options.url, options.engine_model, vocab_size, window, key)
        yield options.url, complete(server, requests, options.max_batch_size)
        return
    print(f"tlt: our engine computes on {options.choose_device()}", file=sys.stderr, flush=True)
    for speculation in options.speculation:
        is_faulty = options.plant_fault and speculation != "off"
        name = f"{speculation}, {options.plant_fault:g} planted" if is_faulty else speculation
        yield name, Answers(_generate(options, speculation, requests))


def _generate(options: Audit, speculation: str, requests: Sequence[Request]) -> tuple[Rollout, ...]:
    from tlt.apps.audit.fault import PlantedFault
    from tlt.engine.build.engine import load_engine
    from tlt.engine.build.model import load_model_for
    from tlt.speculation.law.verify import verify

    faulty = PlantedFault(options.plant_fault, options.seed) if options.plant_fault else verify
    settings = options.engine_settings(speculation, longest(requests))
    model = load_model_for(resolve_model(options.model), options.engine)
    engine = load_engine(model, settings, options.drafter_folder, faulty)
    try:
        return tuple(generate_in_order(engine, requests))
    finally:
        engine.close()


def _read_responses(path: Path, referee: Referee) -> tuple[Rollout, ...]:
    """Other engines' responses: `finish_reason` and `logprobs` are optional."""
    from tlt.training.saved.response_reader import response_ids

    rollouts = []
    sizes = {"vocab_size": referee.vocab_size, "window": referee.window}
    for index, (place, record) in enumerate(read_jsonl(path, "--responses")):
        prompt_ids, token_ids = response_ids(place, record, **sizes)
        if not prompt_ids or not token_ids:
            raise UserError(
                f"{place}: prompt_ids and token_ids need at least one token each; remove the line"
            )
        logprobs = record.get("logprobs") or []
        if not isinstance(logprobs, list) or not all(type(one) in (int, float) for one in logprobs):
            raise UserError(
                f"{place}: logprobs is {shorten(logprobs)}; give a number for each token, or none"
            )
        if logprobs and len(logprobs) != len(token_ids):
            counts = f"{len(token_ids)} token_ids but {len(logprobs)} logprobs"
            raise UserError(f"{place}: has {counts}; give one each, or none")
        sample_index = record.get("sample_index")
        rollouts.append(
            Rollout(
                get_id(place, record, default=f"line {index + 1}"),
                sample_index if isinstance(sample_index, int) else 0,
                prompt_ids,
                token_ids,
                tuple(logprobs),
                "stop" if record.get("finish_reason") == "stop" else "length",
                policy_version=0,
            )
        )
    return tuple(rollouts)


# ------------------------------------------------------------------------------------------------------------
# The verdict


def _explained(report: AuditReport, options: Audit) -> AuditReport:
    from tlt.apps.audit.known import identify, known_fault

    if not report.is_convicted or options.url is None or (server := identify(options.url)) is None:
        return report
    fault = known_fault(server, options.temperature)
    return report if fault is None else replace(report, reasons=(*report.reasons, fault))


def _print_report(report: AuditReport) -> None:
    print(f"{report.mode}: {describe_report(report)}", flush=True)
    for one in report.offenders[:5] if report.is_convicted else ():
        said = f"{one.token_id} {one.text!r} with p = {one.p:.2g}"
        expected = f"{one.expected_id} {one.expected_text!r} with p = {one.expected_p:.2g}"
        where = f"response {one.response} ({one.problem_id}), token {one.position}"
        print(f"  {where}: {said}; expected {expected}")


def describe_report(report: AuditReport) -> str:
    size = f"{report.num_tokens} tokens in {report.num_responses} responses (mean {report.mean_tokens:.1f})"
    verdict = f"NOT lossless: {'; '.join(report.reasons)}" if report.is_convicted else report.verdict
    if report.verdict == "undecided" and report.num_missing:
        verdict += f": {report.num_missing} responses are missing"
    elif report.has_no_evidence:
        needed = "over 5 million" if report.tokens_needed is None else f"{report.tokens_needed:,}"
        verdict = f"undecided: no evidence against; needs {needed} tokens, and has {report.num_tokens:,}"
    elif report.verdict == "undecided":
        verdict += ": an estimate speaks against it, and the bets do not convict it; judge more"
    if report.max_log10_e is None:
        return f"{verdict}; {size}; {report.num_near_ties} near-ties"
    surprise, share = report.surprise, report.elsewhere
    assert surprise is not None
    assert share is not None
    stated = report.tokens_for_power.items()
    power = ", ".join(f"{name}: {tokens or 'over 5 million'}" for name, tokens in stated)
    e_value = f"e-value 10^{report.log10_e:.1f}, at most 10^{report.max_log10_e:.1f}"
    return (
        f"{verdict}; {size}; {e_value} (convicts at {1 / report.alpha:g});"
        f" mean log p + entropy {surprise.value:+.4f} [{surprise.low:+.4f}, {surprise.high:+.4f}] nats;"
        f" from elsewhere {share.value:.2%} [{share.low:.2%}, {share.high:.2%}] ({report.elsewhere_source});"
        f" tokens for 95 % power: {power}"
    )


def _write_reports(options: Audit, out: Path, reports: Sequence[AuditReport]) -> None:
    derived = ("verdict", "is_lossless", "mean_tokens")
    modes = [{**asdict(one), **{name: getattr(one, name) for name in derived}} for one in reports]
    command = " ".join(["tlt", *sys.argv[1:]])
    write_json(
        with_folder(out), {"command": command, "options": options.model_dump(mode="json"), "modes": modes}
    )


def summarize(record: Record) -> Summary:
    verdict = {True: "lossless", False: "NOT lossless", None: "undecided"}
    rows = {name: verdict[mode["lossless"]] for name, mode in record["modes"].items()}
    if (device := record.get("device")) is not None:
        rows["computed on"] = device
    return Summary(verdict[record["lossless"]], rows)

"""`tlt audit engine`, `server` and `responses`: whose tokens are judged; apps/audit/ judges."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from tlt.apps.audit.server import Answers, Endpoint, complete, read_api_key
from tlt.apps.cli.data import Data, PromptOptions
from tlt.apps.cli.engine import EngineOptions, generate_in_order, longest, show_busy
from tlt.apps.cli.options import (
    LISTED,
    SPECULATION,
    File,
    ModelName,
    Options,
    StopNumbers,
    Switch,
    Written,
)
from tlt.apps.cli.summary import Ended, Summary
from tlt.base.config.mistakes import mistake
from tlt.base.config.rollout import SpeculationKey
from tlt.base.config.sampling import LawSection
from tlt.base.io.files import Record, check_output_file, with_folder, write_json
from tlt.base.io.hub import resolve_model
from tlt.base.io.secrets import hide
from tlt.base.io.text import visible
from tlt.base.kinds import BatchSize, MaxTokens, Problems, Samples, Seed, Share, Threads
from tlt.base.speculation import Off, Speculation
from tlt.base.types import Request, SamplingParams, resolve_dtype

if TYPE_CHECKING:
    from tlt.apps.audit.referee import Referee
    from tlt.apps.audit.report import AuditReport
    from tlt.models.hf.tokenizer import Tokenizer


EXIT_CODES = {"lossless": 0, "undecided": 3, "not lossless": 1}
SEVERITY = tuple(EXIT_CODES)


class VerdictOptions(LawSection, Options):
    """The law that the engine was told to draw by, and the verdict:"""

    stop_ids: StopNumbers = SamplingParams.stop_ids
    """Token ids that end a response, beside the model's own."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Largest probability with which a lossless engine is judged not lossless."""
    tolerance: Share = 1e-3
    """Nats by which rounding may move a log-probability; at temperature 0, the gap up to which two tokens are
    tied."""
    referee_dtype: Literal["float32", "float64"] = "float32"
    """Number type of the model in transformers."""
    referee_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model in transformers. auto: the GPU where there is one; cpu where it does not fit there
    beside the engine."""
    few_tokens_pass: Switch = False
    """Exits with 0 also where nothing speaks against the engine, but the tokens are too few to call it
    lossless."""
    out: File = None
    """JSON to write, with the complete reports."""

    def params(self, stop_ids: tuple[int, ...]) -> SamplingParams:
        """stop_ids: the model's own."""
        law = {name: getattr(self, name) for name in LawSection.model_fields}
        return SamplingParams(**law, stop_ids=tuple(sorted({*stop_ids, *self.stop_ids})))


class RequestOptions(PromptOptions):
    """The prompts, and the responses that are asked for:"""

    prompts: Data = None
    """Prompts: a JSONL or Parquet file, a folder of them, or a dataset of the Hugging Face hub. A row has
    prompt (text or chat messages), messages or prompt_ids, and optionally problem_id."""
    task: Annotated[str | None, Written("NAME")] = None
    """A task, such as countdown, whose test problems are answered instead of --prompts."""
    num: Problems = 64
    """Number of problems of --task to answer."""
    samples: Samples = 8
    """Responses to every prompt."""
    max_tokens: MaxTokens = 512
    """Length at which a response is cut off, in tokens; by default also where the model's window ends."""
    seed: Seed = SamplingParams.seed
    """Seed of the sampling: the same seed gives the same tokens, whatever the speculation."""

    @model_validator(mode="after")
    def _names_one_source(self) -> RequestOptions:
        if (self.prompts is None) == (self.task is None):
            raise mistake(
                "--prompts: give the prompts to answer, as --prompts FILE or --task NAME, one of the two"
            )
        return self

    def requests(self, judge: Judge) -> list[Request]:
        from tlt.models.hf.prompts import encode_prompts, make_requests
        from tlt.tasks.base import make_problems

        tokenizer, vocab_size, window = judge.tokenizer, judge.referee.vocab_size, judge.referee.window
        if self.prompts is not None:
            prompts = self.read_prompts(self.prompts, tokenizer, vocab_size=vocab_size, window=window)
        else:
            assert self.task is not None
            problems = make_problems(self.task, self.num, self.seed, {"split": "test"})
            records = [(f"task {self.task}", problem) for problem in problems]
            prompts = encode_prompts(records, tokenizer, vocab_size=vocab_size, window=window)
        params = replace(judge.params, max_tokens=self.max_tokens, seed=self.seed)
        return make_requests(prompts, params, self.samples)


class AuditEngine(RequestOptions, VerdictOptions, EngineOptions):
    """Judge whether TLT's engine, or vLLM under TLT, samples from the model's own probabilities.

    Its tokens are tested against the probabilities that transformers computes.

    Exit code 0: lossless; 1: not lossless; 3: undecided, for want of tokens or because an estimate speaks
    against the engine. --few-tokens-pass makes want of tokens 0, too.
    """

    model: ModelName
    """The model that the engine should follow: a Hugging Face checkpoint folder, or OWNER/NAME on the hub."""
    speculation: Annotated[tuple[SpeculationKey, ...], *LISTED, Written(SPECULATION + "[,...]")] = (Off(),)
    """Modes of the engine, each judged alone: off, adaptive, or a fixed shape such as 4x1x4 (chains of four
    tokens)."""
    plant_fault: Annotated[Share, Written("PROBABILITY")] = 0.0
    """Probability with which TLT's engine accepts a rejected draft, to show that the audit finds such a
    fault."""
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _can_be_faulty(self) -> AuditEngine:
        if len(set(self.speculation)) < len(self.speculation):
            raise mistake(f"--speculation: {','.join(map(str, self.speculation))} must name every mode once")
        if self.plant_fault and self.engine == "vllm":
            raise mistake("--plant-fault: is for engine tlt; vLLM verifies for itself")
        if self.plant_fault and self.speculation == (Off(),):
            needs = "--speculation DEPTHxWIDTHxBUDGET and --drafter DIR"
            raise mistake(f"--plant-fault: is a fault of speculation; give {needs}")
        return self


class AuditServer(RequestOptions, VerdictOptions):
    """Judge whether an OpenAI-compatible server samples from the model's own probabilities.

    Its tokens are tested against the probabilities that transformers computes.

    Exit code 0: lossless; 1: not lossless; 3: undecided, for want of tokens or because an estimate speaks
    against the server. --few-tokens-pass makes want of tokens 0, too.
    """

    model: ModelName
    """The model that the server should follow: a Hugging Face checkpoint folder, or OWNER/NAME on the hub."""
    url: Annotated[str, Written("URL")]
    """The server, such as http://localhost:8000/v1."""
    engine_model: Annotated[str, Written("NAME")]
    """The name by which the server serves the model."""
    api_key_variable: Annotated[str | None, Written("NAME")] = None
    """Environment variable with the server's API key, such as OPENAI_API_KEY; default: no key is sent."""
    max_concurrency: BatchSize = 64
    """Requests in flight at a time."""
    threads: Threads = 1
    """CPU threads to compute with."""


class AuditResponses(VerdictOptions):
    """Judge whether the responses in a file were sampled from the model's own probabilities.

    Their tokens are tested against the probabilities that transformers computes.

    Exit code 0: lossless; 1: not lossless; 3: undecided, for want of tokens or because an estimate speaks
    against the engine. --few-tokens-pass makes want of tokens 0, too.
    """

    model: ModelName
    """The model that was sampled: a Hugging Face checkpoint folder, or OWNER/NAME on the hub."""
    file: Annotated[Path, Written("FILE", is_alone=True)]
    """JSONL of an engine's responses, with prompt_ids and token_ids. Give all of its responses, not a
    selection."""
    threads: Threads = 1
    """CPU threads to compute with."""


# ── the three commands ──────────────────────────────────────────────────────────────────────────────────────


def engine(options: AuditEngine) -> Ended:
    """Returns the exit code of the worst verdict, as all three do."""
    for speculation in options.speculation:
        options.check_engine(speculation)
    judge = Judge.load(options, options.model, options.threads)
    requests = options.requests(judge)
    print(f"tlt: our engine computes on {options.choose_device()}", file=sys.stderr, flush=True)
    reports = []
    for speculation in options.speculation:
        is_faulty = options.plant_fault and not isinstance(speculation, Off)
        name = f"{speculation}, {options.plant_fault:g} planted" if is_faulty else str(speculation)
        answers = _generate(options, speculation, requests)
        reports.append(judge.judge(name, answers, options.max_tokens, options.seed))
        _print_report(reports[-1])
    return _end(options, reports, device=str(options.choose_device()))


def _generate(options: AuditEngine, speculation: Speculation, requests: Sequence[Request]) -> Answers:
    from tlt.apps.audit.fault import PlantedFault
    from tlt.engine.build.engine import load_engine
    from tlt.engine.build.model import load_model_for
    from tlt.speculation.law.verify import verify

    faulty = PlantedFault(options.plant_fault, options.seed) if options.plant_fault else verify
    settings = options.engine_settings(speculation, longest(requests))
    model = load_model_for(resolve_model(options.model), options.engine, None, options.implementation)
    engine = load_engine(model, settings, options.drafter_folder, faulty)
    try:
        return Answers(tuple(generate_in_order(engine, requests)))
    finally:
        engine.close()


def server(options: AuditServer) -> Ended:
    from tlt.apps.audit.known import identify, known_fault

    variable = options.api_key_variable
    key = None if variable is None else read_api_key(variable)  # refused before anything is loaded
    judge = Judge.load(options, options.model, options.threads)
    sizes = judge.referee.vocab_size, judge.referee.window
    endpoint = Endpoint(options.url, options.engine_model, *sizes, key)
    answers = complete(endpoint, options.requests(judge), options.max_concurrency)
    report = judge.judge(options.url, answers, options.max_tokens, options.seed)
    if report.is_convicted and (found := identify(options.url)) is not None:
        fault = known_fault(found, options.temperature)
        report = report if fault is None else replace(report, reasons=(*report.reasons, fault))
    _print_report(report)
    return _end(options, [report])


def responses(options: AuditResponses) -> Ended:
    from tlt.apps.audit.responses import read_responses

    judge = Judge.load(options, options.model, options.threads)
    sizes = {"vocab_size": judge.referee.vocab_size, "window": judge.referee.window}
    report = judge.judge(options.file.name, Answers(read_responses(options.file, **sizes)))
    _print_report(report)
    return _end(options, [report])


@dataclass(frozen=True)
class Judge:
    options: VerdictOptions
    referee: Referee
    tokenizer: Tokenizer | None
    params: SamplingParams
    """The law, with the model's own ends."""

    @staticmethod
    def load(options: VerdictOptions, model: Path, threads: int) -> Judge:
        check_output_file(options.out, "--out")
        folder = resolve_model(model)
        with show_busy():
            import torch

            from tlt.apps.audit.referee import Referee
            from tlt.engine.build.model import resolve_device
            from tlt.models.hf.tokenizer import check_stop_ids, has_tokenizer, load_tokenizer, read_stop_ids

            torch.set_num_threads(threads)
            device = resolve_device(options.referee_device, "--referee-device")
            referee = Referee(folder, resolve_dtype(options.referee_dtype), device)
            tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
        params = options.params(tokenizer.stop_ids if tokenizer is not None else read_stop_ids(folder))
        check_stop_ids(params, referee.vocab_size, "--stop")
        return Judge(options, referee, tokenizer, params)

    def judge(self, mode: str, answers: Answers, limit: int | None = None, seed: int = 0) -> AuditReport:
        """limit: tokens of the longest response that was asked for; None: unknown."""
        from tlt.apps.audit.verdict import Auditor

        if answers.num_missing:
            asked = len(answers.rollouts) + answers.num_missing
            print(
                f"tlt: {answers.num_missing} of {asked} responses are missing, the others are judged: "
                f"{hide(visible(answers.why))}",
                file=sys.stderr,
                flush=True,
            )
        auditor = Auditor(
            self.params,
            self.referee.vocab_size,
            self.referee.window,
            alpha=self.options.alpha,
            tolerance=self.options.tolerance,
            limit=limit,
            seed=seed,
        )
        report = auditor.judge(mode, answers.rollouts, self.referee)
        told = f"tlt: {report.num_responses} responses judged, by the model on {self.referee.model.device}"
        print(told, file=sys.stderr, flush=True)
        report = replace(report, num_missing=answers.num_missing)
        if (tokenizer := self.tokenizer) is None:
            return report
        return report.with_texts(lambda token_id: str(tokenizer.hf.convert_ids_to_tokens(token_id)))


# ── the verdict ─────────────────────────────────────────────────────────────────────────────────────────────


def _end(options: VerdictOptions, reports: Sequence[AuditReport], **facts: str) -> Ended:
    if options.out is not None:
        _write_reports(options, options.out, reports)
    worst = max(reports, key=lambda report: SEVERITY.index(report.verdict))
    modes = {one.mode: {"lossless": one.is_lossless, "log10_e": one.max_log10_e} for one in reports}
    passes = options.few_tokens_pass and all(one.is_lossless or one.has_no_evidence for one in reports)
    summary: Record = {"lossless": worst.is_lossless, "modes": modes, **facts}
    return Ended(summary, 0 if passes else EXIT_CODES[worst.verdict])


def _print_report(report: AuditReport) -> None:
    print(f"{report.mode}: {report.sentence}", flush=True)
    for one in report.offenders[:5] if report.is_convicted else ():
        said = f"{one.token_id} {one.text!r} with p = {one.p:.2g}"
        expected = f"{one.expected_id} {one.expected_text!r} with p = {one.expected_p:.2g}"
        where = f"response {one.response} ({one.problem_id}), token {one.position}"
        print(f"  {where}: {said}; expected {expected}")


def _write_reports(options: VerdictOptions, out: Path, reports: Sequence[AuditReport]) -> None:
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

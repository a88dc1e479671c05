"""`tlt audit engine`, `server` and `responses`; apps/audit/ judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import model_validator

from tlt.apps.audit.relation import Relation, compare, half_prefilled, in_batches
from tlt.apps.audit.server import Answers, Endpoint, complete, read_again, read_api_key
from tlt.apps.cli.data import Data, PromptOptions
from tlt.apps.cli.engine import EngineOptions, generate_in_order, longest
from tlt.apps.cli.judge import Judge, Test, VerdictOptions, end, end_relations, note_missing, print_report
from tlt.apps.cli.judge import summarize as summarize
from tlt.apps.cli.options import LISTED, SPECULATION, ModelName, Switch, Written
from tlt.apps.cli.summary import Ended, log
from tlt.base.config.mistakes import mistake
from tlt.base.config.rollout import SpeculationKey
from tlt.base.io.hub import resolve_model
from tlt.base.speculation import Off, Speculation
from tlt.base.types import Request, Rollout, SamplingParams, UserError
from tlt.base.value_types import BatchSize, MaxTokens, Problems, Samples, Seed, Threads

if TYPE_CHECKING:
    from tlt.engine.backend import RolloutBackend
    from tlt.engine.build.model import ModelFolder


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
    test: Test = "law"
    """law: whether tokens are drawn from the model's own probabilities. invariance: whether the
    log-probabilities of a request's tokens are the same, bit for bit, alone, in batches, with drafts and read
    as a prompt; no reference is needed."""
    batch_sizes: Annotated[tuple[BatchSize, ...], *LISTED, Written("NUM,...")] = (4, 16)
    """Batches that --test invariance compares with single requests; larger ones than there are requests hold
    all."""

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

        tokenizer, vocab_size, window = judge.tokenizer, judge.vocab_size, judge.window
        if self.prompts is not None:
            prompts = self.read_prompts(self.prompts, tokenizer, vocab_size=vocab_size, window=window)
        else:
            assert self.task is not None
            problems = make_problems(self.task, self.num, self.seed, {"split": "test"})
            records = [(f"task {self.task}", problem) for problem in problems]
            prompts = encode_prompts(records, tokenizer, vocab_size=vocab_size, window=window)
        params = replace(judge.params, max_tokens=self.max_tokens, seed=self.seed)
        return make_requests(prompts, params, self.samples)

    def sizes(self, requests: Sequence[Request]) -> list[int]:
        return sorted({min(size, len(requests)) for size in self.batch_sizes})


class AuditEngine(RequestOptions, VerdictOptions, EngineOptions):
    """Judge whether TLT's engine, or vLLM under TLT, samples from the model's own probabilities.

    Its tokens are tested against the probabilities that transformers computes; with --test invariance, their
    log-probabilities against those of the same engine computing otherwise.

    Exit code 0: lossless or invariant; 1: not so; 3: undecided, for want of tokens or because an estimate
    speaks against the engine. --few-tokens-pass makes want of tokens 0, too.
    """

    model: ModelName
    """The model that the engine should follow: a Hugging Face checkpoint folder, or OWNER/NAME on the hub."""
    speculation: Annotated[tuple[SpeculationKey, ...], *LISTED, Written(SPECULATION + "[,...]")] = (Off(),)
    """Modes of the engine, each judged alone: off, adaptive, or a fixed shape such as 4x1x4 (chains of four
    tokens)."""
    equal_rows: Switch = False
    """Whether to compute as a run with run.equal_rows = true does."""
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _names_each_mode_once(self) -> AuditEngine:
        if len(set(self.speculation)) < len(self.speculation):
            raise mistake(f"--speculation: {','.join(map(str, self.speculation))} must name every mode once")
        return self


class AuditServer(RequestOptions, VerdictOptions):
    """Judge whether an OpenAI-compatible server samples from the model's own probabilities.

    Its tokens are tested against the probabilities that transformers computes; with --test invariance, their
    log-probabilities against those of the same server computing otherwise.

    Exit code 0: lossless or invariant; 1: not so; 3: undecided, for want of tokens or because an estimate
    speaks against the server. --few-tokens-pass makes want of tokens 0, too.
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
    against the responses. --few-tokens-pass makes want of tokens 0, too.
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
    judge = Judge.load(options, options.model, options.threads, options.test)
    requests = options.requests(judge)
    device = str(options.choose_device())
    log(f"our engine computes on {device}")
    if options.test == "invariance":
        return end_relations(options, _told(_relations_of_engine(options, requests)), device=device)
    reports = []
    for speculation in options.speculation:
        with _running(options, speculation, longest(requests)) as (engine, _):
            answers = Answers(tuple(generate_in_order(engine, requests)))
        reports.append(judge.judge(str(speculation), answers, options.max_tokens, options.seed))
        print_report(reports[-1])
    return end(options, reports, device=device)


@contextmanager
def _running(
    options: AuditEngine, speculation: Speculation, window: int
) -> Iterator[tuple[RolloutBackend, ModelFolder]]:
    from tlt.engine.build.engine import load_engine
    from tlt.engine.build.model import Model, load_model_for
    from tlt.models.equal_rows import check_equal_rows

    settings = replace(options.engine_settings(speculation, window), equal_rows=options.equal_rows)
    if options.test == "invariance":
        settings = replace(settings, max_batch_size=max(options.batch_sizes))
    model = load_model_for(resolve_model(options.model), options.engine, None, options.implementation)
    if options.equal_rows and isinstance(model, Model):
        check_equal_rows(model.config, settings.dtype, options.choose_device().type, "--equal-rows")
    engine = load_engine(model, settings, options.drafter_folder)
    try:
        yield engine, model
    finally:
        engine.close()


def _relations_of_engine(options: AuditEngine, requests: Sequence[Request]) -> Iterator[Relation]:
    from tlt.apps.audit.trainer import trained_logprobs
    from tlt.engine.build.model import Model
    from tlt.engine.equal_rows import EqualRows
    from tlt.engine.own.engine import RolloutEngine

    alone: list[Rollout] = []
    for speculation in options.speculation:
        with _running(options, speculation, longest(requests)) as (engine, model):

            def answer(batch: Sequence[Request], engine: RolloutBackend = engine) -> list[Rollout]:
                return list(engine.generate(batch))

            singly = in_batches(answer, requests, 1)
            if alone:
                yield compare(f"{speculation}, batch of 1", alone, singly, len(requests))
            alone = alone or singly
            for size in options.sizes(requests):
                batches = in_batches(answer, requests, size)
                yield compare(f"{speculation}, batch of {size}", alone, batches, len(requests))
            continued = half_prefilled(answer, requests, alone)
            yield compare(f"{speculation}, prefilled", alone, continued, len(requests))
    if options.engine == "tlt":
        assert isinstance(model, Model)
        dtype, device = options.choose_dtype(), options.choose_device()
        rows = None
        if options.equal_rows and device.type == "cpu":
            assert isinstance(engine, RolloutEngine)
            rows = EqualRows(engine.target, requests[0].params, lambda: None)
        trained = trained_logprobs(model, dtype, device, alone, options.temperature, rows)
        yield compare("trainer", alone, trained, len(requests))


def server(options: AuditServer) -> Ended:
    variable = options.api_key_variable
    key = None if variable is None else read_api_key(variable)  # refused before anything is loaded
    judge = Judge.load(options, options.model, options.threads, options.test)
    is_relation = options.test == "invariance"
    sizes = judge.vocab_size, judge.window
    endpoint = Endpoint(options.url, options.engine_model, *sizes, key, with_logprobs=is_relation)
    requests = options.requests(judge)
    if is_relation:
        relations = _relations_of_server(endpoint, options.sizes(requests), requests)
        return end_relations(options, _told(relations))
    answers = complete(endpoint, requests, options.max_concurrency)
    if not answers.states_off:
        log("the server refuses options that are off: start it with --generation-config vllm or the like")
    report = judge.judge(options.url, answers, options.max_tokens, options.seed)
    print_report(report)
    return end(options, [report])


def _relations_of_server(
    endpoint: Endpoint, batch_sizes: Sequence[int], requests: Sequence[Request]
) -> Iterator[Relation]:
    def answer(size: int) -> tuple[Rollout, ...]:
        answers = complete(endpoint, requests, size)
        note_missing(answers)
        return answers.rollouts

    alone = answer(1)
    for size in batch_sizes:
        yield compare(f"batch of {size}", alone, answer(size), len(requests))
    try:
        prefilled = read_again(endpoint, alone)
    except UserError as error:  # not every server echoes a prompt, and the other ways stand without it
        log(f"prefilled: not compared: {error}")
    else:
        yield compare("prefilled", alone, prefilled, len(requests))


def _told(relations: Iterator[Relation]) -> list[Relation]:
    found = []
    for relation in relations:
        print(f"{relation.way}: {relation.sentence}", flush=True)
        found.append(relation)
    return found


def responses(options: AuditResponses) -> Ended:
    from tlt.apps.audit.responses import read_responses

    judge = Judge.load(options, options.model, options.threads)
    sizes = {"vocab_size": judge.vocab_size, "window": judge.window}
    report = judge.judge(options.file.name, Answers(read_responses(options.file, **sizes)))
    print_report(report)
    return end(options, [report])

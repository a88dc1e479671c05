"""What the command line's smaller commands do: generate, task, score, audit, drafter train. Values in, a summary out.

This file checks files before work begins and writes each output whole or not at all. It parses no arguments and prints
nothing. Heavy imports stay inside the functions that need them.

    problems.jsonl ──task──▶ ──generate──▶ responses.jsonl ──score──▶ summary
                                                          ├─drafter train──▶ drafter/
                                                          └─audit──▶ verdict
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt.config.load import load_config
from tlt.config.schema import Config
from tlt.files import Record, check_output_file, get_id, read_jsonl, write_atomically, write_jsonl
from tlt.types import Request, Rollout, SamplingParams, UserError, resolve_dtype

if TYPE_CHECKING:
    from tlt.audit.referee import Referee
    from tlt.audit.report import AuditReport
    from tlt.bench.rollout import Options
    from tlt.build import Model
    from tlt.engine.engine import RolloutEngine, Verify
    from tlt.engine.stats import EngineStats
    from tlt.models.tokenizer import Tokenizer
    from tlt.tasks.base import Task


# --------------------------------------------------------------------------------------------------------------------
# generate


@dataclass(frozen=True)
class GenerateOptions:
    """Everything `tlt generate` depends on; `speculation` as in the configuration."""

    model: Path
    prompts: Path
    out: Path
    samples: int
    params: SamplingParams
    speculation: str
    drafter: Path | None
    dtype: str
    device: str
    max_batch_size: int
    threads: int


def generate(options: GenerateOptions) -> Record:
    """Writes one line per response, in the order of prompts and samples; returns the summary."""
    import torch

    from tlt.build import load_model
    from tlt.models.prompts import read_prompts

    _check_generate(options)
    model = load_model(options.model)
    vocab_size, window = model.config.vocab_size, model.config.max_positions
    prompts = read_prompts(options.prompts, model.tokenizer, vocab_size=vocab_size, window=window)

    torch.set_num_threads(options.threads)
    engine = _make_engine(options, options.speculation, model)
    params = replace(options.params, stop_ids=model.stop_ids)
    requests = [
        Request(prompt.problem_id, sample_index, prompt.prompt_ids, params, purpose="generate")
        for prompt in prompts
        for sample_index in range(options.samples)
    ]
    begin = time.perf_counter()
    rollouts = list(engine.generate(requests))
    seconds = time.perf_counter() - begin

    order = {prompt.problem_id: index for index, prompt in enumerate(prompts)}
    rollouts.sort(key=lambda rollout: (order[rollout.problem_id], rollout.sample_index))
    write_jsonl(options.out, (_response_record(rollout, model.tokenizer) for rollout in rollouts))
    return _summarize(rollouts, seconds, engine.stats)


def _check_generate(options: GenerateOptions) -> None:
    _check_engine(options, options.speculation)
    check_output_file(options.out, "--out")


def _check_engine(options: GenerateOptions | AuditOptions, speculation: str) -> None:
    from tlt.drafter.hybrid import drafter_kinds
    from tlt.tuning.tuner import make_tuner

    for name, value in (("samples", options.samples), ("max-batch-size", options.max_batch_size), ("threads", options.threads)):
        if value < 1:
            raise UserError(f"--{name}: is {value}; it must be 1 or more")
    if not 0 <= options.params.seed < 2**63:
        raise UserError(f"--seed: is {options.params.seed}; it must be in [0, 2^63)")
    resolve_dtype(options.dtype)
    make_tuner(speculation, drafter_kinds(options.drafter is not None))
    if options.drafter is not None and not options.drafter.is_dir():
        raise UserError(f"--drafter: {options.drafter} does not exist; give a drafter folder")


def _response_record(rollout: Rollout, tokenizer: Tokenizer | None) -> Record:
    """`text` is null for a model without a tokenizer."""
    return {
        "problem_id": rollout.problem_id,
        "sample_index": rollout.sample_index,
        "prompt_ids": list(rollout.prompt_ids),
        "token_ids": list(rollout.token_ids),
        "text": None if tokenizer is None else tokenizer.decode(rollout.token_ids),
        "logprobs": list(rollout.logprobs),
        "finish_reason": rollout.finish_reason,
    }


def _make_engine(
    options: GenerateOptions | AuditOptions, speculation: str, model: Model, verify: Verify | None = None
) -> RolloutEngine:
    """`verify` None is the engine's own."""
    import torch

    from tlt.build import EngineSettings, build_engine
    from tlt.drafter.folder import load_drafter
    from tlt.speculative.verify import verify as default_verify

    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise UserError("--device: cuda is not available here; give --device cpu or auto")
    settings = EngineSettings(
        speculation,
        dtype=resolve_dtype(options.dtype),
        device="cuda" if has_cuda and options.device != "cpu" else "cpu",
        max_batch_size=options.max_batch_size,
    )
    drafter = None
    if options.drafter is not None and speculation != "off":
        drafter = load_drafter(options.drafter, model.config, model.tensors)
    return build_engine(model.config, model.tensors, settings, drafter, verify=verify or default_verify)


def _summarize(rollouts: Sequence[Rollout], seconds: float, stats: EngineStats) -> Record:
    """`seconds` are of generation, without loading; accept_length is null when nothing was speculated."""
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


# --------------------------------------------------------------------------------------------------------------------
# task and score


def write_problems(name: str, num: int, seed: int, split: str, options: Mapping[str, Any], out: Path) -> Record:
    """Writes `num` problems of the task `name`; equal arguments give an equal file."""
    if num < 1:
        raise UserError(f"--num: is {num}; it must be 1 or more")
    check_output_file(out, "--out")
    problems = make_problems(_get_task(name), name, num, seed, {"split": split, **options})
    write_jsonl(out, problems)
    return {"task": name, "problems": len(problems), "seed": seed, "split": split, "out": str(out)}


def make_problems(task: Task, name: str, num: int, seed: int, options: Mapping[str, Any]) -> list[Record]:
    """The task's problems; an option it does not know or take is the user's mistake."""
    try:
        inspect.signature(task.problems).bind(num, seed, **options)
    except TypeError as error:
        known = [parameter for parameter in inspect.signature(task.problems).parameters if parameter not in ("num", "seed")]
        raise UserError(f"task {name}: options {dict(options)}: {error}; known options are {', '.join(known)}") from None
    try:
        problems = task.problems(num, seed, **options)
    except ValueError as error:
        raise UserError(f"task {name}: {error}") from None
    if not problems:
        raise UserError(f"task {name}: gave no problems for seed {seed} and options {dict(options)}; change them")
    return problems


def _get_task(name: str) -> Task:
    from tlt.tasks.base import get_task

    try:
        return get_task(name)
    except ValueError as error:
        raise UserError(str(error)) from None


@dataclass(frozen=True)
class ProblemScore:
    """The responses to one problem."""

    problem_id: str
    num_responses: int
    num_solved: int
    mean_reward: float


@dataclass(frozen=True)
class Score:
    problems: tuple[ProblemScore, ...]
    """Problems with responses, in the order of the problems file."""
    summary: Record


def score(name: str, problems_path: Path, responses_path: Path, out: Path | None) -> Score:
    """Scores responses ({problem_id, text}) against their problems; optionally writes them again with reward and solved."""
    if out is not None:
        check_output_file(out, "--out")
    task = _get_task(name)
    problems: dict[str, Record] = {}
    for place, problem in read_jsonl(problems_path, "--problems"):
        problem_id = get_id(place, problem)
        if problem_id in problems:
            raise UserError(f"{place}: problem_id {problem_id!r} is there twice; make it unique")
        problems[problem_id] = problem

    verdicts: dict[str, list[Record]] = {problem_id: [] for problem_id in problems}
    scored: list[Record] = []
    for place, response in read_jsonl(responses_path, "--responses"):
        problem_id, text = get_id(place, response), response.get("text")
        if problem_id not in problems:
            raise UserError(f"{place}: problem_id {problem_id!r} is not in {problems_path}; give the problems answered")
        if not isinstance(text, str):
            raise UserError(f"{place}: text is {text!r}; it must be the response's text")
        try:
            verdict = task.score(problems[problem_id], text)
        except KeyError as error:
            raise UserError(f"{problems_path}: problem {problem_id!r} has no {error}; task {name} needs it to score") from None
        verdicts[problem_id].append(verdict)
        scored.append({**response, "reward": verdict["reward"], "solved": verdict["solved"]})
    if out is not None:
        write_jsonl(out, scored)
    return _summarize_scores(verdicts)


def _summarize_scores(verdicts: Mapping[str, Sequence[Record]]) -> Score:
    by_problem = tuple(
        ProblemScore(
            problem_id,
            num_responses=len(records),
            num_solved=sum(bool(record["solved"]) for record in records),
            mean_reward=sum(record["reward"] for record in records) / len(records),
        )
        for problem_id, records in verdicts.items()
        if records
    )
    num_responses = sum(problem.num_responses for problem in by_problem)
    summary = {
        "problems": len(by_problem),
        "responses": num_responses,
        "mean_reward": sum(problem.mean_reward * problem.num_responses for problem in by_problem) / num_responses,
        "solve_rate": sum(problem.num_solved for problem in by_problem) / num_responses,
        "problems_solved_at_least_once": sum(problem.num_solved > 0 for problem in by_problem) / len(by_problem),
        "problems_without_responses": len(verdicts) - len(by_problem),
    }
    return Score(by_problem, summary)


# --------------------------------------------------------------------------------------------------------------------
# audit


@dataclass(frozen=True)
class AuditOptions:
    """Everything `tlt audit` depends on. The responses come from `responses` (a file), from `url` (a server), or from
    our engine, once per entry of `speculations`; the latter two answer `prompts` or `num` problems of `task`."""

    model: Path
    responses: Path | None
    url: str | None
    engine_model: str | None
    prompts: Path | None
    task: str | None
    num: int
    samples: int
    params: SamplingParams
    speculations: tuple[str, ...]
    drafter: Path | None
    plant_fault: float
    alpha: float
    tolerance: float
    referee_dtype: str
    dtype: str
    device: str
    max_batch_size: int
    threads: int
    out: Path | None


def audit(options: AuditOptions, command: str, on_report: Callable[[AuditReport], None]) -> Record:
    """Judges every mode; `on_report` receives each report as it is made. Returns the summary, and writes all to `out`."""
    import torch

    from tlt.audit.referee import Referee
    from tlt.audit.verdict import Auditor
    from tlt.models.tokenizer import has_tokenizer, load_tokenizer, read_stop_ids

    _check_audit(options)
    torch.set_num_threads(options.threads)
    referee = Referee(options.model, resolve_dtype(options.referee_dtype))
    tokenizer = load_tokenizer(options.model) if has_tokenizer(options.model) else None
    params = replace(options.params, stop_ids=tokenizer.stop_ids if tokenizer is not None else read_stop_ids(options.model))
    reports = []
    for mode, rollouts in _audited_modes(options, params, referee, tokenizer):
        auditor = Auditor(
            params,
            referee.vocab_size,
            referee.window,
            alpha=options.alpha,
            tolerance=options.tolerance,
            limit=None if options.responses is not None else params.max_tokens,
            seed=params.seed,
        )
        for rollout in rollouts:
            if rollout.finish_reason == "stop" and rollout.token_ids[-1] not in params.stop_ids:
                raise UserError(
                    f"{mode}: problem {rollout.problem_id!r}, sample {rollout.sample_index} has finish_reason stop but does not"
                    f" end with a stop token {params.stop_ids}; keep the token that ended it"
                )
            auditor.observe(rollout, referee.logits(rollout.prompt_ids, rollout.token_ids))
        report = auditor.report(mode)
        if tokenizer is not None:
            report = _with_texts(report, tokenizer)
        reports.append(report)
        on_report(report)
    if options.out is not None:
        record = {"command": command, "options": {key: str(value) for key, value in vars(options).items()}}
        with write_atomically(options.out) as file:
            modes = [{**asdict(report), "mean_tokens": report.mean_tokens} for report in reports]
            json.dump({**record, "modes": modes}, file, indent=1, ensure_ascii=False)
            file.write("\n")
    return {
        "lossless": all(report.is_lossless for report in reports),
        "modes": {report.mode: {"lossless": report.is_lossless, "log10_e": report.max_log10_e} for report in reports},
    }


def _check_audit(options: AuditOptions) -> None:
    sources = {"--responses": options.responses, "--url": options.url}
    if options.responses is not None and options.url is not None:
        raise UserError("--responses and --url: name two engines; give one of them")
    if options.responses is None and (options.prompts is None) == (options.task is None):
        raise UserError("--prompts: give the prompts to answer, as --prompts FILE or --task NAME, one of the two")
    for name, value in sources.items():
        if value is not None and (options.speculations != ("off",) or options.drafter or options.plant_fault):
            raise UserError(f"{name}: {value} is another engine; leave --speculation, --drafter and --plant-fault out")
    if (options.url is None) != (options.engine_model is None):
        raise UserError("--url and --engine-model belong together: the server's address and the name it serves the model by")
    if options.responses is not None and (options.prompts is not None or options.task is not None):
        raise UserError("--responses: the file holds its prompts itself; leave --prompts and --task out")
    for speculation in options.speculations:
        _check_engine(options, speculation)
    if len(set(options.speculations)) < len(options.speculations) or not options.speculations:
        raise UserError(f"--speculation: {','.join(options.speculations)!r} must name every mode once")
    if options.num < 1:
        raise UserError(f"--num: is {options.num}; it must be 1 or more")
    for name, share in (("plant-fault", options.plant_fault), ("alpha", options.alpha)):
        if not 0 <= share <= 1 or (name == "alpha" and share in (0, 1)):
            raise UserError(f"--{name}: is {share}; it must be a probability")
    if options.plant_fault and set(options.speculations) == {"off"}:
        raise UserError("--plant-fault: is a fault of speculation; give --speculation DEPTHxWIDTHxBUDGET and --drafter DIR")
    if not 0 <= options.tolerance <= 1:
        raise UserError(f"--tolerance: is {options.tolerance}; it must be in [0, 1] nats, 0.001 for a float32 engine")
    if options.out is not None:
        check_output_file(options.out, "--out")


def _audited_modes(
    options: AuditOptions, params: SamplingParams, referee: Referee, tokenizer: Tokenizer | None
) -> Iterator[tuple[str, Sequence[Rollout]]]:
    """Each engine that is to be judged: its name and its responses, in the order they were asked for."""
    if options.responses is not None:
        yield options.responses.name, _read_audited(options.responses, referee)
        return
    from tlt.models.prompts import encode_prompts

    if options.prompts is not None:
        records = read_jsonl(options.prompts, "--prompts")
    else:
        assert options.task is not None
        problems = make_problems(_get_task(options.task), options.task, options.num, params.seed, {"split": "test"})
        records = [(f"task {options.task}", problem) for problem in problems]
    requests = [
        Request(prompt.problem_id, sample_index, prompt.prompt_ids, params, purpose="generate")
        for prompt in encode_prompts(records, tokenizer, vocab_size=referee.vocab_size, window=referee.window)
        for sample_index in range(options.samples)
    ]
    if options.url is not None:
        from tlt.audit.server import complete

        assert options.engine_model is not None
        yield options.url, list(complete(options.url, options.engine_model, requests, options.max_batch_size))
        return
    for speculation in options.speculations:
        yield _audited_name(options, speculation), _generate_audited(options, speculation, requests)


def _audited_name(options: AuditOptions, speculation: str) -> str:
    return f"{speculation}, {options.plant_fault:g} planted" if options.plant_fault and speculation != "off" else speculation


def _generate_audited(options: AuditOptions, speculation: str, requests: Sequence[Request]) -> list[Rollout]:
    from tlt.audit.fault import PlantedFault
    from tlt.build import load_model

    verify = PlantedFault(options.plant_fault, options.params.seed) if options.plant_fault else None
    engine = _make_engine(options, speculation, load_model(options.model), verify)
    order = {(request.problem_id, request.sample_index): index for index, request in enumerate(requests)}
    return sorted(engine.generate(requests), key=lambda rollout: order[rollout.problem_id, rollout.sample_index])


def _read_audited(path: Path, referee: Referee) -> list[Rollout]:
    """Responses of any engine. `finish_reason` and `logprobs` are used where they are there."""
    rollouts = []
    for index, (place, record) in enumerate(read_jsonl(path, "--responses")):
        prompt_ids, token_ids = _response_ids(place, record, vocab_size=referee.vocab_size, window=referee.window)
        if not prompt_ids or not token_ids:
            raise UserError(f"{place}: prompt_ids and token_ids need at least one token each; remove the line")
        logprobs = record.get("logprobs") or ()
        if logprobs and len(logprobs) != len(token_ids):
            raise UserError(f"{place}: has {len(token_ids)} token_ids but {len(logprobs)} logprobs; give one each, or none")
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
    return rollouts


def _with_texts(report: AuditReport, tokenizer: Tokenizer) -> AuditReport:
    def text(token_id: int) -> str:
        return str(tokenizer.hf.convert_ids_to_tokens(token_id))

    offenders = tuple(
        replace(offender, text=text(offender.token_id), expected_text=text(offender.expected_id))
        for offender in report.offenders
    )
    return replace(report, offenders=offenders)


# --------------------------------------------------------------------------------------------------------------------
# drafter train


@dataclass(frozen=True)
class DrafterTrainOptions:
    """Everything `tlt drafter train` depends on."""

    model: Path
    responses: Path | None
    prompts: Path | None
    samples: int
    max_tokens: int
    temperature: float
    out: Path
    init: Path | None
    preset: str | None
    draft_vocab: int | None
    epochs: float
    learning_rate: float
    tokens_per_micro_step: int
    seed: int
    threads: int


_ANSWERS_AT_A_TIME = 64


def train_drafter(options: DrafterTrainOptions, on_progress: Callable[[float, float], None]) -> Record:
    """Trains a drafter on responses of the model `options.model` (given, or made from prompts) and writes it to the new folder
    `options.out`.

    on_progress: receives the share of the tokens done and the loss of the last step.
    """
    import torch

    from tlt.drafter.buffer import is_trainable
    from tlt.drafter.folder import choose_preset, load_drafter, save_drafter
    from tlt.drafter.losses import PRESETS
    from tlt.drafter.model import DraftModel
    from tlt.drafter.offline import OfflineSettings, new_drafter, train_offline
    from tlt.models.hf_config import load_model_config
    from tlt.models.hf_weights import content_hash, load_tensors
    from tlt.models.packed import PackedTransformer

    _check_drafter_train(options)
    config = load_model_config(options.model)
    if options.draft_vocab is not None and not 1 < options.draft_vocab < config.vocab_size:
        raise UserError(
            f"--draft-vocab: {options.draft_vocab} must be more than 1 and less than the vocabulary, {config.vocab_size}"
        )
    tensors = load_tensors(options.model, config)
    stored = None if options.init is None else load_drafter(options.init, config, tensors)
    preset = PRESETS[options.preset or "hass"] if stored is None else choose_preset(options.preset, stored)
    torch.set_num_threads(options.threads)
    if options.responses is not None:
        rollouts = read_responses(options.responses, vocab_size=config.vocab_size, window=config.max_positions)
    else:
        rollouts = _answer(options)
    target = PackedTransformer(config, torch.float32)
    target.load(tensors, version=0)
    if not any(map(is_trainable, rollouts)):
        source = "--prompts: they have" if options.responses is None else f"--responses: {options.responses} has"
        raise UserError(f"{source} no response of three tokens or more; give longer ones")
    if stored is None:
        model = new_drafter(config, preset, options.draft_vocab, rollouts, options.seed)
    else:
        model = DraftModel(stored.config)
        model.load_state_dict(stored.tensors)
    settings = OfflineSettings(
        options.epochs, options.learning_rate, options.tokens_per_micro_step, options.seed, options.temperature
    )
    summary = train_offline(model, target, preset, rollouts, settings, on_progress)

    about = {
        "preset": preset.name,
        "target": content_hash(tensors),
        "num_tokens": summary.tokens,
        "init": str(options.init or "random"),
    }
    save_drafter(options.out, model, torch.bfloat16, about)
    return {"responses": len(rollouts), **asdict(summary), "out": str(options.out)}


def _answer(options: DrafterTrainOptions) -> list[Rollout]:
    """Returns the model's own responses to the prompts, made by adaptive speculation without a learned drafter."""
    from tlt.build import EngineSettings, build_engine, load_model
    from tlt.models.prompts import read_prompts

    assert options.prompts is not None, "responses or prompts are given"
    model = load_model(options.model)
    vocab_size, window = model.config.vocab_size, model.config.max_positions
    prompts = read_prompts(options.prompts, model.tokenizer, vocab_size=vocab_size, window=window)
    params = SamplingParams(options.temperature, max_tokens=options.max_tokens, stop_ids=model.stop_ids, seed=options.seed)
    engine = build_engine(model.config, model.tensors, EngineSettings("adaptive", max_batch_size=_ANSWERS_AT_A_TIME))
    requests = [
        Request(prompt.problem_id, index, prompt.prompt_ids, params, purpose="generate")
        for prompt in prompts
        for index in range(options.samples)
    ]
    answered = {(rollout.problem_id, rollout.sample_index): rollout for rollout in engine.generate(requests)}
    return [answered[request.problem_id, request.sample_index] for request in requests]


def _check_drafter_train(options: DrafterTrainOptions) -> None:
    if (options.responses is None) == (options.prompts is None):
        given = "neither" if options.responses is None else "both"
        raise UserError(f"--responses, --prompts: {given} given; give one of them")
    counts = {
        "tokens-per-micro-step": options.tokens_per_micro_step,
        "threads": options.threads,
        "samples": options.samples,
        "max-tokens": options.max_tokens,
    }
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"--{name}: is {value}; it must be 1 or more")
    for name, rate in (("epochs", options.epochs), ("learning-rate", options.learning_rate)):
        if not 0 < rate < float("inf"):
            raise UserError(f"--{name}: is {rate}; it must be more than 0")
    if options.draft_vocab is not None and options.init is not None:
        raise UserError(f"--draft-vocab: {options.draft_vocab} given, but the drafter of --init brings its own; leave one out")
    if options.draft_vocab is not None and options.preset != "eagle3":
        raise UserError(f"--draft-vocab: {options.draft_vocab} needs --preset eagle3; other drafters use the target's head")
    if options.out.exists():
        raise UserError(f"--out: {options.out} exists; give the name of a new folder")
    check_output_file(options.out, "--out")


def read_responses(path: Path, *, vocab_size: int, window: int) -> list[Rollout]:
    """Responses as `tlt generate` writes them; only their ids are needed."""
    rollouts = []
    for index, (place, record) in enumerate(read_jsonl(path, "--responses")):
        prompt_ids, token_ids = _response_ids(place, record, vocab_size=vocab_size, window=window)
        rollouts.append(Rollout(f"line {index}", 0, prompt_ids, token_ids, (), "stop", policy_version=0))
    return rollouts


def _response_ids(place: str, record: Record, *, vocab_size: int, window: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from tlt.models.tokenizer import check_prompt

    ids: list[tuple[int, ...]] = []
    for key in ("prompt_ids", "token_ids"):
        value = record.get(key)
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise UserError(f"{place}: {key} must be a list of whole numbers, as tlt generate writes it")
        ids.append(tuple(value))
    prompt_ids, token_ids = ids
    if len(prompt_ids) + len(token_ids) > window:
        length = len(prompt_ids) + len(token_ids)
        raise UserError(f"{place}: has {length} tokens but the model's window is {window}; remove the line")
    check_prompt(prompt_ids + token_ids, place, vocab_size=vocab_size, window=window + 1)
    return prompt_ids, token_ids


# --------------------------------------------------------------------------------------------------------------------
# train


MAY_CHANGE_ON_RESUME = frozenset(
    {"out_dir", "num_steps", "num_ranks", "threads_per_rank", "device", "checkpoint_every", "time_limit_minutes"}
)
"""Keys of [run] that say how long and on what a run runs, not what it computes."""


def resolve_train_config(path: Path | None, overrides: Sequence[str], resume: Path | None) -> Config:
    """The configuration of a new run, or with `resume` of the run in that folder, refusing to mix the two up."""
    if resume is None:
        if path is None:
            raise UserError("train: no configuration given; write tlt train CONFIG.toml, or --resume DIR to continue a run")
        config = load_config(path, overrides)
        if (config.run.out_dir / "config.json").exists():
            raise UserError(
                f"run.out_dir: {config.run.out_dir} holds a run already;"
                f" continue it with --resume {config.run.out_dir}, or give another --run.out_dir"
            )
        return config
    written = resume / "config.json"
    if not written.is_file():
        raise UserError(f"--resume: {resume} holds no run (no config.json); give the folder that the run wrote")
    config = load_config(path or written, [*overrides, "--run.out_dir", str(resume)])
    _refuse_changes(load_config(written), config, resume)
    return config


def _refuse_changes(before: Config, now: Config, folder: Path) -> None:
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    for section, values in old.items():
        for key, value in values.items():
            may_change = section == "run" and key in MAY_CHANGE_ON_RESUME
            if not may_change and new[section][key] != value:
                raise UserError(
                    f"--resume: {section}.{key} is {new[section][key]!r} but the run in {folder} has {value!r};"
                    " a resumed run keeps its configuration: remove the change, or start a new run"
                )


# --------------------------------------------------------------------------------------------------------------------
# bench


def bench_rollout(
    config_path: Path, overrides: Sequence[str], options: Options, command: str, say: Callable[[str], None]
) -> Record:
    """Measures the configuration's rollout (see bench/rollout.py); returns the ratios over off, by measurement."""
    from tlt.bench.rollout import PARTS, run_benchmark
    from tlt.drafter.hybrid import drafter_kinds
    from tlt.training.start import preflight
    from tlt.tuning.tuner import make_tuner

    _check_words("parts", options.parts, PARTS)
    counts = [("rounds", options.rounds), ("steps", options.steps)]
    for name, value in [*counts, *(("batches", b) for b in options.batches)]:
        if value < 1:
            raise UserError(f"--{name}: {value} is too small; give 1 or more")
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    config = load_config(config_path, overrides)
    if "workload" in options.parts and config.rollout.speculation == "off":
        raise UserError("rollout.speculation is off, so there is nothing to compare; set it to adaptive, or leave workload out")
    for variant in options.variants:
        if variant != "beg-mab":
            make_tuner(variant, drafter_kinds(config.drafter.path is not None))
    preflight(config)
    report = run_benchmark(config, options, command, say)
    return {
        m["name"]: m.get("median_ratio") or {n: r["mean"] for n, r in m["ratios"].items()}
        for m in report["measurements"]
        if "ratios" in m or "median_ratio" in m
    }


@dataclass(frozen=True)
class BenchTrainOptions:
    """What `tlt bench train` compares with `off`, for how long, and the common stem of its two result files."""

    out: Path
    variants: tuple[str, ...]
    steps: int
    minutes: float


def bench_train(config_path: Path, overrides: Sequence[str], options: BenchTrainOptions, command: str) -> Record:
    """Whole runs side by side (see bench/train.py); returns off's step time over each variant's. Stopped by the user, it
    reports what was measured and exits as a run does."""
    from tlt.bench.report import header, write_report
    from tlt.bench.train import FROZEN, OFF, Plan, launch_runs
    from tlt.bench.train_report import summarize, to_markdown
    from tlt.training.start import preflight

    changes = {"tlt": {}, "frozen": FROZEN}
    _check_words("variants", options.variants, tuple(changes))
    if not options.variants:
        raise UserError("--variants: is empty; give some of tlt, frozen")
    if options.steps < 1:
        raise UserError(f"--steps: {options.steps} is too small; give 1 or more")
    if not 0 < options.minutes < float("inf"):
        raise UserError(f"--minutes: {options.minutes} is no length of time; give more than 0")
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    config = load_config(config_path, overrides)
    if config.rollout.speculation == "off":
        raise UserError("rollout.speculation is off, so there is nothing to compare; set it to adaptive")
    if "frozen" in options.variants and not config.drafter.train:
        raise UserError("--variants: frozen differs from tlt only where drafter.train is true; set it, or leave frozen out")
    preflight(config)
    plan = Plan({"off": OFF, **{name: changes[name] for name in options.variants}}, options.steps, options.minutes)
    code = launch_runs(config, plan)
    if code not in (0, 130, 143):
        raise SystemExit(code)
    report = {**header(config, command), **summarize(config.run.out_dir, tuple(plan.runs))}
    write_report(options.out, report, to_markdown("Whole steps with and without TLT", report))
    if code:
        raise SystemExit(code)
    return {name: report["runs"][name]["ratios"]["off"]["mean"] for name in options.variants}


def _check_words(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for word in given:
        if word not in known:
            raise UserError(f"--{option}: {word!r} is unknown; give some of {', '.join(known)}")

"""The command line: parse, call, print. Knows no tensor; everything heavy is imported inside the command that needs it.

A user's mistake, in an argument or in a file, is one line on stderr, `tlt: error: place: value; remedy`, and exit code 2.
Ctrl-C is 130. Anything else is our fault and shows its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import FlagConversionOff, Positional, arg

from tlt import __version__
from tlt.cli import init

# --------------------------------------------------------------------------------------------------------------------
# What can be said


@dataclass(frozen=True)
class Train:
    """Train a policy with RL.

    New: tlt train CONFIG [--section.key value ...], where every value of the configuration can be overridden by its
    name, such as --optimizer.learning_rate 1e-4. Continued: tlt train --resume DIR [--run.num_steps N ...].
    """

    config: Annotated[Positional[Path | None], arg(metavar="[CONFIG]")] = None
    """TOML configuration; may be left out with --resume."""
    resume: Annotated[Path | None, arg(metavar="DIR")] = None
    """Continue the run in this folder. Its configuration stays, but for how long and on what it runs (run.*)."""


@dataclass(frozen=True)
class Generate:
    """Generate responses to prompts; speculation changes nothing but the time."""

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Hugging Face checkpoint folder."""
    prompts: Path
    """JSONL: prompt (text), prompt_ids or messages (chat), and optionally problem_id."""
    out: Path
    """JSONL: one response a line."""
    samples: int = 1
    """Responses per prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """0 is off."""
    seed: int = 0
    """The same seed gives the same tokens, whatever the speculation."""
    max_tokens: int = 2048
    """Longest response."""
    speculation: Annotated[str, arg(metavar="off|adaptive|DEPTHxWIDTHxBUDGET")] = "off"
    """How to draft; other than off needs --drafter."""
    drafter: Annotated[Path | None, arg(metavar="DIR")] = None
    """Drafter folder."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of weights and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    max_batch_size: int = 64
    """Sequences decoded at a time."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class Task:
    """Write problems of a task."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """A registered task such as countdown, or package.module:object."""
    num: int
    """How many problems."""
    out: Path
    """JSONL: one problem a line."""
    seed: int = 0
    """The same seed gives the same problems."""
    split: Literal["train", "test"] = "train"
    """The two share no problem."""
    options: Annotated[str, arg(metavar="JSON")] = "{}"
    """The task's own options, as a JSON object."""


@dataclass(frozen=True)
class Score:
    """Score responses: mean reward, solve rate, and each problem's."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """A registered task such as countdown, or package.module:object."""
    problems: Path
    """JSONL, as tlt task writes it."""
    responses: Path
    """JSONL with problem_id and text, as tlt generate writes it."""
    out: Annotated[Path | None, arg(metavar="PATH")] = None
    """Write the responses again, with reward and solved."""


@dataclass(frozen=True)
class Audit:
    """Judge whether an engine samples what the model says: exit code 0 lossless, 1 not.

    The engine is ours by default, once per --speculation; any other through --responses or --url. Its tokens are held
    against the probabilities of transformers' own model by a betting test, valid after however many tokens.
    """

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Hugging Face checkpoint folder of the target."""
    prompts: Path | None = None
    """JSONL: prompt (text), prompt_ids or messages (chat), and optionally problem_id."""
    task: Annotated[str | None, arg(metavar="NAME")] = None
    """Instead of --prompts: problems of a task such as countdown, its test split."""
    num: int = 64
    """Problems of --task."""
    responses: Path | None = None
    """Judge this JSONL of responses with prompt_ids and token_ids, all that were asked for."""
    url: Annotated[str | None, arg(metavar="URL")] = None
    """Judge an OpenAI-compatible server such as http://localhost:8000/v1."""
    engine_model: Annotated[str | None, arg(metavar="NAME")] = None
    """The model's name on that server."""
    samples: int = 8
    """Responses per prompt."""
    temperature: float = 1.0
    """What the engine was told; 0 is greedy. So are the next three."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """0 is off."""
    max_tokens: int = 512
    """Longest response."""
    seed: int = 0
    """Of the engine, and of the task's problems."""
    speculation: Annotated[str, arg(metavar="off|adaptive|DEPTHxWIDTHxBUDGET[,...]")] = "off"
    """Modes of our engine, each judged alone; other than off need --drafter."""
    drafter: Annotated[Path | None, arg(metavar="DIR")] = None
    """Drafter folder."""
    plant_fault: Annotated[float, arg(metavar="PROBABILITY")] = 0.0
    """Accept a rejected draft so often: the audit must find it."""
    alpha: float = 1e-4
    """False-positive rate."""
    tolerance: float = 1e-3
    """Nats by which the engine's rounding may move a log-probability; at temperature 0, a near-tie."""
    referee_dtype: Literal["float32", "float64"] = "float32"
    """Of the referee's forward."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of our engine's weights and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of our engine; the referee runs on the CPU."""
    max_batch_size: int = 64
    """Sequences decoded at a time; requests in flight for --url."""
    threads: int = 1
    """CPU threads."""
    out: Annotated[Path | None, arg(metavar="PATH")] = None
    """Write the whole reports as JSON."""


@dataclass(frozen=True)
class DrafterTrain:
    """Train a drafter for a model on its own responses."""

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Hugging Face checkpoint folder of the target."""
    out: Path
    """Folder of the drafter; must not exist yet."""
    responses: Annotated[Path | None, arg(metavar="PATH")] = None
    """JSONL with prompt_ids and token_ids, as tlt generate writes it."""
    prompts: Annotated[Path | None, arg(metavar="PATH")] = None
    """Instead of responses: prompts as for tlt generate, which the model answers first."""
    samples: int = 1
    """Responses to each prompt."""
    max_tokens: int = 2048
    """Longest of these responses."""
    temperature: float = 1.0
    """They are sampled at."""
    init: Annotated[Path | None, arg(metavar="DIR")] = None
    """Start from this drafter instead of a random one."""
    preset: Literal["eagle", "hass", "eagle3"] | None = None
    """How it is trained, and in which form: docs/drafter.md. Without it that of --init, else hass."""
    draft_vocab: Annotated[int | None, arg(metavar="N")] = None
    """eagle3: propose only the N most frequent tokens of the responses."""
    epochs: float = 1.0
    """Passes over the responses."""
    learning_rate: float = 1e-3
    """Peak: a short warm-up before it, a linear end after the first half."""
    tokens_per_micro_step: int = 512
    """Tokens per optimizer step."""
    seed: int = 0
    """Of initialization and order."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class DrafterExport:
    """Write a drafter as vLLM or SGLang loads it, with the command that serves it."""

    drafter: Annotated[Positional[Path], arg(metavar="DIR")]
    """Drafter folder, of tlt or of another trainer."""
    target: Annotated[Path, arg(metavar="MODEL")]
    """Hugging Face checkpoint folder of the model it drafts for; EAGLE-3 drafters carry rows of its head along."""
    to: Path
    """New folder."""
    format: Literal["vllm-eagle", "vllm-eagle3", "sglang-eagle3", "speculators"]
    """eagle drafters: vllm-eagle; eagle3 drafters: the others."""


@dataclass(frozen=True)
class DrafterEval:
    """Measure how often a drafter's guesses are accepted: by position, by the target's entropy, by its own confidence."""

    drafter: Annotated[Positional[Path], arg(metavar="DIR")]
    """Drafter folder, of tlt or of another trainer."""
    model: Path
    """Hugging Face checkpoint folder of the target."""
    prompts: Path
    """JSONL: prompt (text), prompt_ids or messages (chat), and optionally problem_id."""
    out: Annotated[Path | None, arg(metavar="PATH")] = None
    """Write the whole result as JSON."""
    depth: int = 3
    """Guesses per verification, in a chain: what vLLM calls num_speculative_tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    samples: int = 1
    """Responses per prompt."""
    max_tokens: int = 512
    """Longest response."""
    seed: int = 0
    """Of the sampling."""
    max_batch_size: int = 8
    """Sequences decoded at a time."""
    rounds: int = 2
    """Timed rollouts with and without the drafter, in turns; 0 leaves them out."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class BenchRollout:
    """Measure how fast a configuration's rollout is with speculation, against none."""

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """TOML configuration, as for tlt train."""
    out: Path
    """Results go to OUT.json and OUT.md."""
    parts: str = "constant,workload"
    """Some of constant (batches that stay at one size) and workload (the configuration's own phases)."""
    variants: str = "adaptive"
    """Besides off: adaptive, beg-mab, fixed strategies such as 4x1x4 or ngram:8x1x8."""
    batches: str = "1,2,4,8,16,32"
    """Batch sizes of constant."""
    rounds: int = 8
    """At each constant batch size."""
    seconds: float = 2.0
    """One stretch at a constant batch."""
    steps: int = 12
    """Rollout phases of workload, on all ranks."""


@dataclass(frozen=True)
class BenchTrain:
    """Measure whole RL runs in turns: the configuration as it is against the same system without speculation.

    The runs stay in run.out_dir; the same command with more --steps continues them.
    """

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """TOML configuration, as for tlt train."""
    out: Path
    """Results go to OUT.json and OUT.md."""
    variants: str = "tlt,frozen"
    """Besides off: tlt (the configuration), frozen (it, but for drafter training)."""
    steps: int = 20
    """RL steps of every run."""
    minutes: float = 60.0
    """No step begins that would not end within them."""


COMMANDS: dict[str, type] = {
    "init": init.Init,
    "train": Train,
    "generate": Generate,
    "task": Task,
    "score": Score,
    "audit": Audit,
    "drafter train": DrafterTrain,
    "drafter export": DrafterExport,
    "drafter eval": DrafterEval,
    "bench rollout": BenchRollout,
    "bench train": BenchTrain,
}


# --------------------------------------------------------------------------------------------------------------------
# What is done


def run(command: Any, overrides: Sequence[str]) -> int:
    """Carries out a command; returns the exit code."""
    match command:
        case init.Init():
            return init.run(command)
        case Train():
            return _train(command, overrides)
        case Generate():
            return _generate(command)
        case Task():
            return _task(command)
        case Score():
            return _score(command)
        case Audit():
            return _audit(command)
        case DrafterTrain():
            return _drafter_train(command)
        case DrafterExport():
            return _drafter_export(command)
        case DrafterEval():
            return _drafter_eval(command)
        case BenchRollout():
            return _bench_rollout(command, overrides)
        case BenchTrain():
            return _bench_train(command, overrides)
        case _:
            raise AssertionError(command)


def _train(command: Train, overrides: Sequence[str]) -> int:
    started_at = time.time()
    from tlt.cli.commands import resolve_train_config

    config = resolve_train_config(command.config, overrides, command.resume)
    from tlt.training.start import start

    return start(config, started_at)


def _generate(command: Generate) -> int:
    from tlt.cli import commands
    from tlt.types import SamplingParams

    params = SamplingParams(
        temperature=command.temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        min_p=command.min_p,
        max_tokens=command.max_tokens,
        seed=command.seed,
    )
    options = commands.GenerateOptions(
        model=command.model,
        prompts=command.prompts,
        out=command.out,
        samples=command.samples,
        params=params,
        speculation=command.speculation,
        drafter=command.drafter,
        dtype=command.dtype,
        device=command.device,
        max_batch_size=command.max_batch_size,
        threads=command.threads,
    )
    return _print_json(commands.generate(options))


def _task(command: Task) -> int:
    from tlt.cli import commands
    from tlt.types import UserError

    try:
        options = json.loads(command.options)
    except json.JSONDecodeError as error:
        raise UserError(f"--options: {command.options!r} is no JSON ({error.msg}); write an object") from None
    if not isinstance(options, dict):
        raise UserError(f"--options: {command.options!r} is no JSON object; write one such as '{{\"key\": 1}}'")
    return _print_json(commands.write_problems(command.name, command.num, command.seed, command.split, options, command.out))


def _score(command: Score) -> int:
    from tlt.cli import commands

    score = commands.score(command.name, command.problems, command.responses, command.out)
    width = max(len(problem.problem_id) for problem in score.problems)
    for problem in score.problems:
        solved = f"{problem.num_solved}/{problem.num_responses}"
        print(f"{problem.problem_id:<{width}}  solved {solved}  mean reward {problem.mean_reward:.3f}")
    summary = score.summary
    print(f"mean reward {summary['mean_reward']:.4f}, solve rate {summary['solve_rate']:.4f}")
    return _print_json(summary)


def _audit(command: Audit) -> int:
    from tlt.audit.report import AuditReport
    from tlt.cli import commands
    from tlt.types import SamplingParams

    given = dict(vars(command))
    law = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed")
    params = SamplingParams(**{name: given.pop(name) for name in law})
    speculations = tuple(word.strip() for word in given.pop("speculation").split(",") if word.strip())

    def show(report: AuditReport) -> None:
        print(f"{report.mode}: {describe_audit(report)}", flush=True)
        for offender in () if report.is_lossless else report.offenders[:5]:
            print(
                f"  response {offender.response} ({offender.problem_id}), token {offender.position}: {offender.token_id}"
                f" {offender.text!r} with p = {offender.p:.2g}; expected {offender.expected_id} {offender.expected_text!r}"
                f" with p = {offender.expected_p:.2g}"
            )

    options = commands.AuditOptions(params=params, speculations=speculations, **given)
    summary = commands.audit(options, " ".join(["tlt", *sys.argv[1:]]), show)
    _print_json(summary)
    return 0 if summary["lossless"] else 1


def describe_audit(report: Any) -> str:
    """One line of an AuditReport."""
    size = f"{report.num_tokens} tokens in {report.num_responses} responses (mean {report.mean_tokens:.1f})"
    verdict = "lossless" if report.is_lossless else f"NOT lossless: {'; '.join(report.reasons)}"
    if report.max_log10_e is None:
        return f"{verdict}; {size}; {report.num_near_ties} near-ties"
    surprise, share = report.surprise, report.elsewhere
    power = ", ".join(f"{name}: {tokens or 'over 5 million'}" for name, tokens in report.tokens_for_power.items())
    return (
        f"{verdict}; {size};"
        f" e-value 10^{report.log10_e:.1f}, at most 10^{report.max_log10_e:.1f} (convicts at {1 / report.alpha:g});"
        f" mean log p + entropy {surprise.value:+.4f} [{surprise.low:+.4f}, {surprise.high:+.4f}] nats;"
        f" from elsewhere {share.value:.2%} [{share.low:.2%}, {share.high:.2%}] ({report.elsewhere_source});"
        f" tokens for 95 % power: {power}"
    )


def _drafter_train(command: DrafterTrain) -> int:
    from tlt.cli import commands

    shown = time.monotonic()

    def show(share: float, loss: float) -> None:
        nonlocal shown
        if time.monotonic() - shown >= 5:
            shown = time.monotonic()
            print(f"drafter: {share:.0%} of the tokens, loss {loss:.4f}", file=sys.stderr, flush=True)

    return _print_json(commands.train_drafter(commands.DrafterTrainOptions(**vars(command)), show))


def _drafter_export(command: DrafterExport) -> int:
    from tlt.cli import commands_drafter

    def warn(line: str) -> None:
        print(f"tlt drafter export: warning: {line}", file=sys.stderr)

    return _print_json(commands_drafter.export(commands_drafter.ExportOptions(**vars(command)), warn))


def _drafter_eval(command: DrafterEval) -> int:
    from tlt.cli import commands_drafter

    summary = commands_drafter.evaluate(commands_drafter.EvalOptions(**vars(command)))
    _print_evaluation(summary)
    return _print_json(summary)


def _print_evaluation(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tlt.bench.report import number, ratio_text

    console = Console(highlight=False)
    console.print(
        f"{summary['form']} drafter, chains of {summary['depth']}, temperature {summary['temperature']:g}: accept length "
        f"{summary['accept_length']:.2f} over {summary['num_verifications']} verifications of {summary['responses']} responses"
    )
    if (speed := summary.get("speedup")) is not None:
        console.print(f"speed over none, batch {speed['batch_size']}: {ratio_text(speed)}")
    positions = Table("position", "accepted", title="all guesses up to here", title_justify="left")
    for position, share in enumerate(summary["by_position"], start=1):
        positions.add_row(str(position), f"{share:.3f}")
    console.print(positions)
    error = f"confidence (mean error {summary['calibration_error']:.3f})"
    for key, title in (("by_entropy", "target's entropy, nats"), ("by_confidence", error)):
        table = Table("from", "to", "mean", "guesses", "accepted", title=title, title_justify="left")
        for bucket in summary[key]:
            bounds = (number(bucket[name]) for name in ("low", "high", "mean"))
            table.add_row(*bounds, str(bucket["num_guesses"]), f"{bucket['accepted']:.3f}")
        console.print(table)


def _bench_rollout(command: BenchRollout, overrides: Sequence[str]) -> int:
    from tlt.bench.rollout import Options
    from tlt.cli import commands

    options = Options(
        parts=_words(command.parts),
        variants=_words(command.variants),
        batches=_numbers("batches", command.batches, int),
        rounds=command.rounds,
        seconds=command.seconds,
        steps=command.steps,
        out=command.out,
    )
    words = ["tlt bench rollout", *sys.argv[3:]]
    return _print_json(
        commands.bench_rollout(command.config, overrides, options, " ".join(words), lambda line: print(line, flush=True))
    )


def _bench_train(command: BenchTrain, overrides: Sequence[str]) -> int:
    from tlt.cli import commands

    options = commands.BenchTrainOptions(command.out, _words(command.variants), command.steps, command.minutes)
    words = ["tlt bench train", *sys.argv[3:]]
    return _print_json(commands.bench_train(command.config, overrides, options, " ".join(words)))


def _numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(word) for word in text.split(",") if word)
    except ValueError:
        raise UsageError(f"--{option}: {text!r} is no list of numbers; write them as 1,2,4") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _print_json(summary: dict[str, Any]) -> int:
    """The last line of a command is for programs."""
    print(json.dumps(summary), flush=True)
    return 0


# --------------------------------------------------------------------------------------------------------------------
# Parse


class UsageError(Exception):
    """Arguments that say nothing we know, in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"tlt {__version__}")
        return 0
    try:
        command, overrides = parse(arguments)
        return run(command, overrides)
    except UsageError as error:
        return _fail(error)
    except KeyboardInterrupt:
        print("tlt: interrupted", file=sys.stderr)
        return 130
    except ValueError as error:
        from tlt.types import UserError  # here, since it brings torch

        if isinstance(error, UserError):
            return _fail(error)
        raise


def parse(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The command with its arguments, and the configuration overrides (of `train` and `bench`)."""
    name, rest = _split_name(arguments)
    overrides: list[str] = []
    if name in ("train", "bench rollout", "bench train"):
        rest, overrides = split_overrides(rest)
    try:
        return _parse_command(name, rest), overrides
    except SystemExit as exit_:
        if not exit_.code:  # --help: once more, now for the terminal with its width and colours
            tyro.cli(COMMANDS[name], prog=f"tlt {name}", args=rest, config=(FlagConversionOff,))
        raise


def _parse_command(name: str, arguments: list[str]) -> Any:
    """tyro looks at stdout to decide how to draw its boxes; without a terminal they are plain text to condense."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(io.StringIO()):
            return tyro.cli(COMMANDS[name], prog=f"tlt {name}", args=arguments, config=(FlagConversionOff,))
    except SystemExit as exit_:
        if not exit_.code:
            raise
        raise UsageError(f"{condense(box.getvalue())}; see tlt {name} --help") from None


def _split_name(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The command's name, of one word or two, and what follows it."""
    for num_words in (2, 1):
        name = " ".join(arguments[:num_words])
        if name in COMMANDS:
            return name, list(arguments[num_words:])
    word = arguments[0]
    if longer := [name for name in COMMANDS if name.startswith(f"{word} ")]:
        raise UsageError(f"{word}: incomplete command; write tlt {' | tlt '.join(longer)}")
    nearest = [name for name in COMMANDS if name.startswith(word)] or difflib.get_close_matches(word, COMMANDS, n=1)
    remedy = f"did you mean tlt {nearest[0]}?" if nearest else f"commands are {', '.join(COMMANDS)}"
    raise UsageError(f"{word}: unknown command; {remedy}")


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes `--section.key value` and `--section.key=value` out of the arguments; tlt.config.schema reads them."""
    rest: list[str] = []
    overrides: list[str] = []
    pending = list(arguments)
    while pending:
        word = pending.pop(0)
        if not re.match(r"--[^=]*\.", word):
            rest.append(word)
            continue
        overrides.append(word)
        if "=" not in word and pending and not pending[0].startswith("--"):
            overrides.append(pending.pop(0))
    return rest, overrides


def condense(box: str) -> str:
    """tyro's error as one line: its message without title, rules, help texts and the hint at --help.

    The plain box: a title, then sections between rules of dashes; two columns of margin.
    """
    sections: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line[2:].rstrip()
        if text.strip("-") == "" and "---" in text:
            sections.append([])
        elif text.strip() and not text.startswith(" " * 8):  # deeper lines are an option's help text
            sections[-1].append(text.strip())
    hints = ("Argument helptext", "For full helptext")
    message = " ".join(" ".join(section) for section in sections[1:] if section and not section[0].startswith(hints))
    return (message or " ".join(box.split())).rstrip(".")


def _fail(error: Exception) -> int:
    print(f"tlt: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _help() -> str:
    """The commands with the first line of their docstrings."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {(cls.__doc__ or '').splitlines()[0]}" for name, cls in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tlt COMMAND ...",
            "",
            "Train reasoning models with RL; speculative decoding makes the rollout faster without changing the result.",
            "",
            *lines,
            "",
            "tlt COMMAND --help explains a command; tlt --version prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

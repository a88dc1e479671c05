"""Our engine beside vLLM and llama.cpp at real sizes: the same prompts, lengths, types and threads, in turns.

    python -m benchmarks.real_size smollm2 --model.path base --drafter.path drafter --vllm PYTHON --out OUT
    python -m benchmarks.real_size countdown --geometry qwen2.5-0.5b --keep DIR --llama PYTHON --out OUT
    python -m benchmarks.real_size countdown --workload recipes/countdown/longtail.json --vllm PYTHON …

    config ─ grow ─▶ model, drafter ─┬──────────────────────────────▶ tlt, law     (see competitors.py)
                                     ├─ export (vllm-eagle) ────────▶ vllm
                                     └─ export (GGUF) ──────────────▶ llama

Every response gets exactly --tokens tokens, or as many as the workload says: nothing else ends one. Every
round has its own prompts, or those of the workload, the same for all competitors. --alive says how many
processes live at a time; more are measured group by group, with our engine off in every group. PYTHON:
interpreters with vLLM (`make vllm-test` sets one up) and with llama-cpp-python; without one its competitors
are left out. A cold tuner starts with every batch. OUT is written after every cell; --resume goes on from it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.command import carry_out, make_parser
from benchmarks.gguf_export import export_gguf
from benchmarks.grown import grown_config, plan_growth
from benchmarks.longtail import hash_model, read_workload
from benchmarks.real_size.competitors import BASE, DEFAULT, Competitor, Plan, Process, check_python
from benchmarks.real_size.report import Runs, describe_cell, runs_of_cell, to_markdown
from benchmarks.real_size.serving import Took, Work
from benchmarks.report import environment, header, write_report
from benchmarks.turns import rounds_in_turns
from tlt.apps.run.start import pin
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.io.files import check_output_file
from tlt.base.types import Problem, UserError, resolve_dtype
from tlt.drafter.formats.export import FORMATS, export_drafter
from tlt.drafter.formats.layouts import DescribedTarget
from tlt.engine.build.engine import load_stored_drafter
from tlt.engine.build.model import drafter_folder, model_folder, open_model
from tlt.models.hf.config import config_to_hf
from tlt.models.hf.weights import content_hash
from tlt.models.packed import EMBEDDING, HEAD
from tlt.training.build.problems import load_problems, problems_of_step

WARM_UP = 8
"""Tokens of the untimed batch before every cell; warm competitors generate the whole batch."""

CAVEATS = (
    "Prompts are read within the time, the same for all; without --workload every round has others. vLLM "
    "keeps what prompts begin with, as it does by default.",
    "vLLM's own drafts: with its faulty kernel for CPUs repaired (vllm#55005), which judges them at random.",
    "llama.cpp: keys, values and attention in float16, its default for weights of any type.",
)

Item = tuple[Problem, int]
"""A problem, and the tokens of the response to it."""


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Returns options and configuration. Raises UserError now rather than after an hour."""
    parser = make_parser("real_size", __doc__)
    parser.add_argument(
        "config", type=Path, help="TOML configuration or recipe; --section.key VALUE overrides it"
    )
    parser.add_argument("--geometry", help="grow model and drafter, benchmarks/grown.py")
    parser.add_argument(
        "--workload", type=Path, help="a file of the long tail: one batch of all its requests"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for what is grown and exported; default: a temporary one"
    )
    parser.add_argument(
        "--competitors", type=words_of(str), default=DEFAULT, help=f"default: {','.join(DEFAULT)}"
    )
    parser.add_argument("--batches", type=words_of(int), default=(1, 4, 16, 64))
    parser.add_argument("--temperatures", type=words_of(float), help="default: the configuration's")
    parser.add_argument("--tokens", type=int, default=96, help="of every response")
    parser.add_argument(
        "--rounds", type=int, default=3, help="batches of every competitor at each batch size"
    )
    parser.add_argument(
        "--cell-minutes",
        type=float,
        default=math.inf,
        help="no further round of a cell after as many minutes",
    )
    parser.add_argument("--split", choices=("train", "test"), default="train", help="problems to take")
    parser.add_argument("--resume", action="store_true", help="keep the cells of OUT.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--pinned",
        type=words_of(str),
        default=("vllm",),
        help="engines whose OpenMP threads are bound to cores",
    )
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--alive", type=int, default=4, help="processes that live at a time, ours included")
    parser.add_argument("--vllm", type=Path, help="interpreter of an environment with vLLM")
    parser.add_argument("--llama", type=Path, help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--quick", action="store_true", help="one round at batch 1 and 4, of 32 tokens")
    options, overrides = parser.parse_known_args(arguments)
    if options.quick:
        options.batches, options.rounds, options.tokens = (1, 4), 1, 32
    if min(*options.batches, options.rounds, options.tokens, options.threads, options.alive - 1) < 1:
        raise UserError("--batches, --rounds, --tokens, --threads: give 1 or more; --alive: 2 or more")
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    config = load_config(options.config, overrides)
    options.temperatures = options.temperatures or (config.sampling.temperature,)
    return options, config


def words_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(word.strip()) for word in text.split(",") if word.strip())


def choose(options: argparse.Namespace, has_drafter: bool) -> tuple[list[Competitor], list[str]]:
    """Returns the competitors, the base first, and a note on those that are left out."""
    asked = [Competitor.parse(name) for name in dict.fromkeys((BASE, *options.competitors))]
    lacks = {
        "law": options.vllm is None,
        "vllm": options.vllm is None,
        "llama": options.llama is None,
        "tlt": False,
        "any": False,
    }
    left = [one for one in asked if lacks[one.engine] or (one.needs_drafter() and not has_drafter)]
    names = ", ".join(one.name for one in left)
    notes = [f"Left out, for want of an interpreter (--vllm, --llama) or a drafter: {names}."] if left else []
    return [one for one in asked if one not in left], notes


def groups(competitors: Sequence[Competitor], alive: int) -> Iterator[list[Competitor]]:
    """Yields the competitors whose processes live at the same time. The base is in every group, the others of
    our engine are in the first."""
    ours = [one for one in competitors if one.engine == "tlt"]
    processes = list(dict.fromkeys(one.process for one in competitors if one.engine != "tlt"))
    for start in range(0, max(len(processes), 1), alive - 1):
        chosen = processes[start : start + alive - 1]
        yield (ours if start == 0 else ours[:1]) + [one for one in competitors if one.process in chosen]


def prepare(options: argparse.Namespace, config: Config, keep: Path, longest: int) -> Plan:
    """Exports model and drafter for the other engines, unless `keep` has them already. Raises UserError for
    an adapter, which these would not see. longest: tokens of the longest sequence."""
    if config.model.adapter is not None:
        remedy = (
            "give a folder with it merged, such as a run's policy, as --model.path, and --model.adapter none"
        )
        raise UserError(
            f"model.adapter: {config.model.adapter} lies beside the model that all read; {remedy}"
        )
    folder, own = model_folder(config), drafter_folder(config)
    dtype = config.run.dtype
    model = open_model(folder)
    mark = content_hash(model.tensors)[:8]
    gguf = None if options.llama is None else keep / f"{mark}-{dtype}.gguf"
    if gguf is not None and not gguf.exists():
        export_gguf(folder, gguf, resolve_dtype(dtype))
    exported = None
    if own is not None and options.vllm is not None:
        stored = load_stored_drafter(own, model)
        assert stored is not None
        method = stored.config.method
        exported = {
            "method": method,
            "model": str((keep / f"{mark}-{content_hash(stored.tensors)[:8]}").absolute()),
        }
        if not Path(exported["model"]).exists():
            name = next(n for n, form in FORMATS.items() if form.method == method and form.engine == "vLLM")
            (architecture,) = config_to_hf(model.config, resolve_dtype(dtype))["architectures"]
            head_VE = model.tensors[EMBEDDING if model.config.tie_embeddings else HEAD]
            export_drafter(
                stored, name, DescribedTarget(folder.name, architecture, head_VE), Path(exported["model"])
            )
    window, c = longest + 16, model.config
    token_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * resolve_dtype(dtype).itemsize
    kv_gib = 0.5 + 1.25 * max(options.batches) * window * token_bytes / 2**30
    others = {"law": options.vllm, "vllm": options.vllm, "llama": options.llama}
    pythons = {
        "tlt": Path(sys.executable),
        "any": Path(sys.executable),
        **{name: path and path.absolute() for name, path in others.items()},
    }
    return Plan(
        folder.absolute(), gguf, own and own.absolute(), exported, dtype, options.threads,
        max_batch_size=max(options.batches), window=window, kv_gib=round(kv_gib, 2), pythons=pythons,
        pinned=options.pinned, eager=options.eager,
    )  # fmt: skip


def measure_cell(
    competitors: Sequence[Competitor],
    processes: dict[str, Process],
    items: Sequence[Item],
    options: argparse.Namespace,
    cell: tuple[float, int],
) -> list[Runs]:
    """Measures one temperature and batch size."""
    temperature, batch_size = cell

    def work(one: Competitor, index: int) -> Work:
        chosen = [items[(index * batch_size + i) % len(items)] for i in range(batch_size)]
        prompts = [(f"{i}/{p.problem_id}", list(p.prompt_ids)) for i, (p, _) in enumerate(chosen)]
        return Work(one.way, prompts, [num_tokens for _, num_tokens in chosen], temperature, index)

    def run(one: Competitor, rounds: Iterator[int]) -> Took:
        took = processes[one.process].ask(work(one, next(rounds)))
        print(f"  {one.name}: {took.num_tokens / took.seconds:,.1f} tokens/s", flush=True)
        return took

    takers = [one for one in competitors if one.takes(batch_size)]
    for one in takers:
        untimed = work(one, 0)
        if one.way != "warm":
            untimed = replace(untimed, lengths=[min(WARM_UP, num) for num in untimed.lengths])
        processes[one.process].ask(untimed)
    end = time.monotonic() + 60 * options.cell_minutes
    rounds = rounds_in_turns({one.name: partial(run, one, count(1)) for one in takers}, options.rounds)
    found = next(rounds)
    while time.monotonic() < end and (later := next(rounds, None)):
        found = later
    return [Runs(name, took, found[BASE]) for name, took in found.items()]


def measure(
    options: argparse.Namespace,
    plan: Plan,
    competitors: Sequence[Competitor],
    items: Sequence[Item],
    earlier: Mapping[str, Any] | None,
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yields versions and cells after every cell. earlier: an interrupted run's report."""
    cells = [(temperature, batch) for batch in options.batches for temperature in options.temperatures]
    runs = {cell: [] if earlier is None else runs_of_cell(earlier, *cell) for cell in cells}
    versions: dict[str, Any] = {} if earlier is None else dict(earlier["versions"])
    with ExitStack() as all_of_it:
        folder = Path(all_of_it.enter_context(tempfile.TemporaryDirectory(prefix="tlt-real-size-")))
        ours = all_of_it.enter_context(Process(competitors[0], plan, folder))
        for group in groups(competitors, options.alive):
            lacking = [cell for cell in cells if _lacks(runs[cell], group, cell[1])]
            with ExitStack() as stack:
                processes = {"tlt": ours}
                for one in group if lacking else ():
                    if one.process not in processes:
                        print(f"starting {one.process}", flush=True)
                        processes[one.process] = stack.enter_context(Process(one, plan, folder))
                versions |= {name: process.versions for name, process in processes.items()}
                for cell in lacking:
                    print(f"temperature {cell[0]:g}, batch {cell[1]}", flush=True)
                    measured = measure_cell(group, processes, items, options, cell)
                    known = {one.name for one in runs[cell]}
                    runs[cell] += [one for one in measured if one.name not in known]
                    yield versions, [describe_cell(*cell, found) for cell, found in runs.items() if found]


def _lacks(runs: Sequence[Runs], group: Sequence[Competitor], batch_size: int) -> bool:
    """Returns whether a competitor of the group is still to be measured."""
    return not {one.name for one in group if one.takes(batch_size)} <= {one.name for one in runs}


def read_earlier(options: argparse.Namespace, command: str) -> Mapping[str, Any] | None:
    """Returns the report that --resume goes on from. Raises UserError where another command wrote it."""
    path = options.out.with_name(options.out.name + ".json")
    if not options.resume or not path.exists():
        return None
    report: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if (report["command"], report["environment"]) != (command, environment()):
        remedy = "give the same command at the same commit, or another --out"
        raise UserError(f"--resume: {path} is of another command or commit, `{report['command']}`; {remedy}")
    return report


def items_of(options: argparse.Namespace, config: Config) -> list[Item]:
    """Returns the problems in random order, or those of the workload, which is then the one batch."""
    if options.workload is None:
        problems = load_problems(config, options.split)
        shuffled = problems_of_step(problems, 0, len(problems), seed=1)
        return [(problem, options.tokens) for problem in shuffled]
    workload = read_workload(options.workload, hash_model(model_folder(config)))
    options.batches = (len(workload.requests),)
    prompts = [Problem(request.problem_id, request.prompt_ids) for request in workload.requests]
    return list(zip(prompts, workload.lengths, strict=True))


def run_benchmark(options: argparse.Namespace, config: Config, command: str) -> None:
    earlier = read_earlier(options, command)
    config = pin(config)
    growth = None if options.geometry is None else plan_growth(config, options.geometry)
    with ExitStack() as stack:
        keep = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tlt-real-size-")))
        keep.mkdir(parents=True, exist_ok=True)
        config, grown = stack.enter_context(grown_config(config, growth, keep))
        items = items_of(options, config)
        plan = prepare(options, config, keep, max(len(p.prompt_ids) + num_tokens for p, num_tokens in items))
        competitors, notes = choose(options, plan.drafter is not None)
        lengths = [num_tokens for _, num_tokens in items]
        num_tokens = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
        setup = {"dtype": plan.dtype, "num_tokens": num_tokens, "threads": options.threads}
        setup |= {"rounds": options.rounds, "pinned": options.pinned}
        subject = options.geometry or plan.model.name
        described = {**header(config, command), **grown, "subject": subject, "setup": setup}
        described["notes"] = [
            *notes,
            *CAVEATS,
            f"Threads bound to cores: those of {', '.join(options.pinned) or 'nobody'}.",
        ]
        report = {} if earlier is None else dict(earlier)
        for versions, cells in measure(options, plan, competitors, items, earlier):
            report = {**described, "versions": versions, "cells": cells}
            write_report(options.out, report, to_markdown(report))
    print(to_markdown(report))


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, config = parse(words)
    for option, path, package in (("--vllm", options.vllm, "vllm"), ("--llama", options.llama, "llama_cpp")):
        if path is not None:
            check_python(option, path, package)
    said = (
        Path(word).name if Path(word).is_absolute() else word for word in words if word != "--resume"
    )  # no folders of this machine
    run_benchmark(options, config, " ".join(["python -m benchmarks.real_size", *said]))


if __name__ == "__main__":
    sys.exit(carry_out("real_size", main))

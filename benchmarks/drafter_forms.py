"""Drafters of several forms beside each other in our engine: how much of a draft is accepted, what it takes, and
how fast the engine is with it.

    python -m benchmarks.drafter_forms countdown --drafters hass=DIR,dflash=DIR --out OUT
    python -m benchmarks.drafter_forms smollm2/reasoning --model.path DIR --model.adapter none --drafters … --out OUT

    fixed      every draft is a chain of --depth tokens, or of the drafter's block
    adaptive   the tuner's choice, with the engine of the batches before

How each was trained stands beside it, as its folder says. All answer the same prompts in turns, and have the same
tokens by the law, which is checked. Every response gets exactly --tokens tokens.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import carry_out, make_parser, words
from benchmarks.drafter_growth import grow_drafter
from benchmarks.grown import Growth, grown_config, plan_growth
from benchmarks.real_size.serving import Took, Work
from benchmarks.real_size.with_law import run
from benchmarks.report import header, markdown, number, ratio_text, speed_text, table, write_report
from tlt.apps.run.start import pin
from tlt.base.config.drafter import DrafterSection
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.io.files import check_output_file
from tlt.base.types import Problem, UserError, resolve_dtype
from tlt.drafter.formats.folder import StoredDrafter
from tlt.engine.build.engine import EngineSettings, build_engine, load_stored_drafter
from tlt.engine.build.model import Model, model_folder, open_model
from tlt.engine.own.engine import RolloutEngine
from tlt.training.problems import load_problems, problems_of_step
from tlt.training.report.ratio import Ratio, in_turns

OFF, FIXED, ADAPTIVE = "off", "fixed", "adaptive"


@dataclass(frozen=True)
class Subject:
    """The model, and the drafters by name."""

    model: Model
    drafters: dict[str, StoredDrafter]
    dtype: torch.dtype
    window: int
    problems: Sequence[Problem]


class DraftClock:
    """Measures the seconds of an engine's drafts."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.seconds, self.num_drafts = 0.0, 0
        self._propose = engine.drafter.propose
        setattr(engine.drafter, "propose", self._timed)  # noqa: B010  # mypy assigns no method

    def _timed(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        proposal = self._propose(*arguments)
        self.seconds += time.perf_counter() - start
        self.num_drafts += 1
        return proposal

    def take(self) -> float | None:
        """Returns the mean seconds of a draft since the last call; None: there was none."""
        mean = self.seconds / self.num_drafts if self.num_drafts else None
        self.seconds, self.num_drafts = 0.0, 0
        return mean


class Competitor:
    """An engine with one drafter and one way to speculate.

    weights: tensors, or those of another engine, which are shared.
    speculation: see `EngineSettings`.
    """

    def __init__(
        self,
        subject: Subject,
        weights: Any,
        batch_size: int,
        drafter: StoredDrafter | None,
        speculation: str,
    ) -> None:
        settings = EngineSettings(
            dtype=subject.dtype,
            window=subject.window,
            max_batch_size=batch_size,
            speculation=speculation,
            drafting=DrafterSection(train=False),
        )
        self.engine = build_engine(subject.model.config, weights, settings, drafter)
        self.clock = DraftClock(self.engine)

    def run(self, work: Work) -> tuple[Took, float | None]:
        self.clock.take()
        return run(self.engine, work), self.clock.take()


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """Returns the parser of what every comparison of drafters asks for."""
    parser = make_parser(name, about)
    parser.add_argument(
        "config", type=Path, help="TOML configuration or recipe; --section.key VALUE overrides it"
    )
    parser.add_argument("--drafters", type=words, required=True, help="NAME=FOLDER, separated by commas")
    parser.add_argument("--geometry", help="grow model and drafters, benchmarks/grown.py")
    parser.add_argument("--tokens", type=int, default=96, help="of every response")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    return parser


def read(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Returns options, with the drafters' folders by name, and configuration."""
    options, overrides = parser.parse_known_args(arguments)
    options.folders = dict(word.partition("=")[::2] for word in options.drafters)
    if missing := [name for name, folder in options.folders.items() if not Path(folder).is_dir()]:
        raise UserError(f"--drafters: {missing[0]} names no folder; give NAME=FOLDER")
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    return options, load_config(options.config, overrides)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Returns options and configuration."""
    parser = parser_of("drafter_forms", __doc__)
    parser.add_argument(
        "--batches", type=words, default=("1", "4", "16", "64"), help="sizes, separated by commas"
    )
    parser.add_argument("--temperatures", type=words, default=("0", "1"), help="separated by commas")
    parser.add_argument("--rounds", type=int, default=4, help="in which all take turns")
    parser.add_argument("--depth", type=int, default=7, help="of the fixed chains")
    options, config = read(parser, arguments)
    options.batches = tuple(map(int, options.batches))
    options.temperatures = tuple(map(float, options.temperatures))
    return options, config


@contextmanager
def loaded(options: argparse.Namespace, config: Config) -> Iterator[tuple[Subject, dict[str, Any]]]:
    """Loads model and drafters, grown to options.geometry if it is given. Yields them, and what a report says
    of the growth."""
    growth = None if options.geometry is None else plan_growth(config, options.geometry)
    with grown_config(config, growth, options.out.parent) as (config, grown):
        subject = load(options, config, growth)
        yield subject, {**grown, "subject": options.geometry or subject.model.path.name}


def load(options: argparse.Namespace, config: Config, growth: Growth | None) -> Subject:
    """Loads model and drafters. growth: of the model, along with which the drafters grow; None: it has not."""
    dtype = resolve_dtype(config.run.dtype)
    model = open_model(model_folder(config), dtype)
    found = {}
    for name, folder in options.folders.items():
        stored = load_stored_drafter(Path(folder), model if growth is None else growth.small)
        assert stored is not None, folder
        if growth is not None:
            small = growth.small
            stored = grow_drafter(stored, small.config, small.tensors, model.config, dtype)
        found[name] = stored
    problems = load_problems(config, "train")
    shuffled = problems_of_step(problems, 0, len(problems), seed=1)
    window = max(len(problem.prompt_ids) for problem in shuffled) + options.tokens + 16
    return Subject(model, found, dtype, window, shuffled)


def measure_cell(
    subject: Subject, options: argparse.Namespace, temperature: float, batch_size: int
) -> dict[str, Any]:
    """Returns the figures of one temperature and batch size."""
    off = Competitor(subject, subject.model.tensors, batch_size, None, "off")
    weights, competitors = off.engine.model, {OFF: off}
    for name, drafter in subject.drafters.items():
        depth = min(options.depth, drafter.config.max_depth)
        for way, speculation in ((FIXED, f"learned:{depth}x1x{depth}"), (ADAPTIVE, "adaptive")):
            competitors[f"{name} {way}"] = Competitor(subject, weights, batch_size, drafter, speculation)

    def one(competitor: Competitor, rounds: Iterator[int]) -> tuple[Took, float | None]:
        index = next(rounds)
        chosen = [
            subject.problems[(index * batch_size + i) % len(subject.problems)] for i in range(batch_size)
        ]
        prompts = [(f"{i}/{p.problem_id}", list(p.prompt_ids)) for i, p in enumerate(chosen)]
        return competitor.run(Work("", prompts, [options.tokens] * batch_size, temperature, index))

    for competitor in competitors.values():
        one(competitor, count(0))  # compiles, and warms the tuners
    rounds = {name: count(1) for name in competitors}
    tasks = {name: partial(one, competitors[name], rounds[name]) for name in competitors}
    found = in_turns(tasks, options.rounds)
    for name, runs in found.items():
        if [took.token_hash for took, _ in runs] != [took.token_hash for took, _ in found[OFF]]:
            print(
                f"temperature {temperature:g}, batch {batch_size}: {name} has other tokens", file=sys.stderr
            )
    base = [took for took, _ in found[OFF]]
    cell = {name: figures(runs, base) for name, runs in found.items()}
    for name, known in cell.items():
        print(
            f"  {name}: {known['tokens_per_second']:,.1f} tokens/s, {known['times_off']['mean']:.2f}",
            flush=True,
        )
    return {"temperature": temperature, "batch_size": batch_size, "competitors": cell}


def figures(runs: Sequence[tuple[Took, float | None]], base: Sequence[Took]) -> dict[str, Any]:
    """Returns a competitor's figures. base: the runs without drafts, in the same rounds."""
    ratio = Ratio.of([off.seconds / took.seconds for off, (took, _) in zip(base, runs, strict=True)])
    lengths = [took.accept_length for took, _ in runs if took.accept_length is not None]
    drafts = [1e3 * seconds for _, seconds in runs if seconds is not None]
    equal = [off.token_hash == took.token_hash for off, (took, _) in zip(base, runs, strict=True)]
    return {
        "tokens_per_second": statistics.median(took.num_tokens / took.seconds for took, _ in runs),
        "times_off": asdict(ratio),
        "accept_length": statistics.mean(lengths) if lengths else None,
        "draft_ms": statistics.median(drafts) if drafts else None,
        "equal_rounds": sum(equal),
        "rounds": [asdict(took) for took, _ in runs],
    }


def to_markdown(report: dict[str, Any]) -> str:
    """Returns a table of each temperature: drafters by batch size."""
    setup, cells = report["setup"], report["cells"]
    about = (
        f"Chains of {setup['depth']} tokens: accept length · milliseconds of a draft · times off. Then times off "
        f"of the tuner's choice, which may be drafts of retrieval, too. Times off are geometric means with a "
        f"95 % interval. {setup['tokens']} tokens a response, {setup['threads']} threads, {setup['rounds']} "
        f"rounds in turns."
    )
    known = [one for cell in cells for one in cell["competitors"].values()]
    equal = sum(one["equal_rounds"] for one in known), sum(len(one["rounds"]) for one in known)
    blocks = [about, f"Batches whose tokens are those of off: {equal[0]} of {equal[1]}."]
    for temperature in dict.fromkeys(cell["temperature"] for cell in cells):
        blocks += [
            f"## Temperature {temperature:g}",
            _table([c for c in cells if c["temperature"] == temperature], report["drafters"]),
        ]
    return markdown(f"{report['subject']}: drafters of several forms", report, *blocks)


def _table(cells: Sequence[dict[str, Any]], drafters: dict[str, dict[str, Any]]) -> str:
    off = [f"{speed_text(cell['competitors'][OFF]['tokens_per_second'])} tokens/s" for cell in cells]
    rows = [["off", "", "", "", *off]]
    for name, known in drafters.items():
        row = [
            name,
            known["preset"] or "–",
            number(known["num_tokens"], ",d"),
            number(known["cpu_seconds"], ",.0f"),
        ]
        for cell in cells:
            fixed, tuned = (cell["competitors"][f"{name} {way}"] for way in (FIXED, ADAPTIVE))
            length, draft_ms = number(fixed["accept_length"]), number(fixed["draft_ms"])
            ratios = f"{ratio_text(fixed['times_off'])} · tuner {ratio_text(tuned['times_off'])}"
            row.append(f"{length} · {draft_ms} ms · {ratios}")
        rows.append(row)
    columns = ["", "preset", "tokens trained on", "processor seconds"]
    return table([*columns, *(f"batch {cell['batch_size']}" for cell in cells)], rows)


def benchmark(arguments: Sequence[str]) -> None:
    options, config = parse(arguments)
    torch.set_num_threads(options.threads)
    config = pin(config)
    with loaded(options, config) as (subject, grown):
        command = said("drafter_forms", arguments)
        setup = {name: getattr(options, name) for name in ("tokens", "threads", "rounds", "depth")}
        drafters = {name: about(one) for name, one in subject.drafters.items()}
        described = {**header(config, command), **grown, "setup": setup, "drafters": drafters}
        cells: list[dict[str, Any]] = []
        for temperature in options.temperatures:
            for batch_size in options.batches:
                print(f"temperature {temperature:g}, batch {batch_size}", flush=True)
                cells.append(measure_cell(subject, options, temperature, batch_size))
                report = {**described, "cells": cells}
                write_report(options.out, report, to_markdown(report))
    print(to_markdown(report))


def said(name: str, arguments: Sequence[str]) -> str:
    """Returns the line that repeats the measurement, without folders of this machine."""
    words = [re.sub(r"(?<![\w.])/([^/,]+/)*", "", word) for word in arguments]
    return " ".join([f"python -m benchmarks.{name}", *words])


def about(drafter: StoredDrafter) -> dict[str, Any]:
    """Returns what says how large a drafter is and how it was trained; None: its folder does not say."""
    config = drafter.config
    num_numbers = sum(tensor.numel() for tensor in drafter.tensors.values())
    return {"method": config.method, "layers": config.layer.num_layers, "numbers": num_numbers,
            "draft_vocab_size": config.draft_vocab_size, "depth": config.max_depth,
            **{name: drafter.about.get(name) for name in ("preset", "num_tokens", "cpu_seconds")}}  # fmt: skip


if __name__ == "__main__":
    sys.exit(carry_out("drafter_forms", lambda: benchmark(sys.argv[1:])))

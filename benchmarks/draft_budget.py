"""One budget of verified tokens for the whole batch, beside one draft length for all, in our engine.

    python -m benchmarks.draft_budget countdown --drafters hass=DIR,dspark=DIR --out OUT

    one length    every request verifies the whole draft, as long as the tuner chooses     confidence_threshold = 0
    budget        a request's draft ends where its next token brings less than it costs    the default
    fixed 0.4     it ends where the chance that it is accepted falls below this            confidence_threshold = 0.4

Acceptance is mixed: of each batch's requests every second one has the temperature --hard, at which a drafter guesses
worse, the others --easy. All answer the same prompts in turns, warm, and have the same tokens by the law.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any

import torch

from benchmarks.command import carry_out, words
from benchmarks.drafter_forms import Competitor, Subject, loaded, parser_of, read, said
from benchmarks.real_size.with_law import hash_tokens
from benchmarks.report import header, markdown, number, ratio_text, speed_text, table, write_report
from tlt.config.schema import Config
from tlt.engine.stats import EngineStats
from tlt.report.ratio import Ratio, in_turns, seconds_of
from tlt.training.start import pin
from tlt.types import Request, Rollout, SamplingParams

ONE_LENGTH = "one length"
THRESHOLDS = {ONE_LENGTH: 0.0, "budget": None, "fixed 0.4": 0.4}


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Returns options and configuration."""
    parser = parser_of("draft_budget", __doc__)
    parser.add_argument("--batches", type=words, default=("8", "16", "64"), help="sizes, separated by commas")
    parser.add_argument("--easy", type=float, default=0.6, help="temperature of every other request")
    parser.add_argument("--hard", type=float, default=1.4, help="temperature of the others")
    parser.add_argument("--rounds", type=int, default=8, help="in which all take turns")
    return read(parser, arguments)


def generate(competitor: Competitor, requests: Sequence[Request]) -> dict[str, Any]:
    """Answers the requests; returns seconds, accept length and a digest of the tokens."""
    engine, rollouts = competitor.engine, list[Rollout]()
    engine.stats = EngineStats()
    seconds = seconds_of(lambda: rollouts.extend(engine.generate(requests)))
    stats = engine.stats
    return {
        "seconds": seconds,
        "tokens": sum(len(rollout.token_ids) for rollout in rollouts),
        "accept_length": stats.accept_length,
        "digest": hash_tokens(rollouts),
        "by_strategy": {name: one.seconds for name, one in stats.by_strategy.items()},
    }


def requests_of(subject: Subject, options: argparse.Namespace, batch_size: int, index: int) -> list[Request]:
    problems = subject.problems
    chosen = [problems[(index * batch_size + i) % len(problems)] for i in range(batch_size)]
    temperatures = [options.hard if i % 2 else options.easy for i in range(batch_size)]
    params = [SamplingParams(temperature, max_tokens=options.tokens) for temperature in temperatures]
    rows = zip(chosen, params, strict=True)
    return [
        Request(f"{i}/{p.problem_id}", 0, tuple(p.prompt_ids), one, "rollout", index)
        for i, (p, one) in enumerate(rows)
    ]


def measure_cell(subject: Subject, options: argparse.Namespace, name: str, batch_size: int) -> dict[str, Any]:
    """Returns the figures of one drafter and batch size."""
    drafter = subject.drafters[name]
    weights: Any = subject.model.tensors
    competitors = {}
    for way, threshold in THRESHOLDS.items():
        competitors[way] = Competitor(subject, weights, batch_size, drafter, "adaptive", threshold)
        weights = competitors[way].engine.model

    def one(competitor: Competitor, rounds: Iterator[int]) -> dict[str, Any]:
        return generate(competitor, requests_of(subject, options, batch_size, next(rounds)))

    for competitor in competitors.values():
        one(competitor, count(0))
    rounds = {way: count(1) for way in competitors}
    found = in_turns(
        {way: partial(one, competitors[way], rounds[way]) for way in competitors}, options.rounds
    )
    base, cell = found[ONE_LENGTH], {}
    for way, runs in found.items():
        pairs = list(zip(base, runs, strict=True))
        assert all(a["digest"] == b["digest"] for a, b in pairs), f"{name}, {way}: other tokens"
        cell[way] = {
            "tokens_per_second": statistics.median(run["tokens"] / run["seconds"] for run in runs),
            "over_one_length": asdict(Ratio.of([a["seconds"] / b["seconds"] for a, b in pairs])),
            "accept_length": statistics.mean(run["accept_length"] or 1.0 for run in runs),
            "rounds": runs,
        }
        print(
            f"  {way}: {cell[way]['tokens_per_second']:,.0f} {ratio_text(cell[way]['over_one_length'])}",
            flush=True,
        )
    return {"drafter": name, "batch_size": batch_size, "ways": cell}


def to_markdown(report: dict[str, Any]) -> str:
    rows = []
    for cell in report["cells"]:
        row = [cell["drafter"], cell["batch_size"]]
        for way in THRESHOLDS:
            known = cell["ways"][way]
            length, speed = number(known["accept_length"]), speed_text(known["tokens_per_second"])
            row.append(f"{speed} · {length} · {ratio_text(known['over_one_length'])}")
        rows.append(row)
    setup = report["setup"]
    about = (
        f"Tokens/s · accept length · times one length for all, geometric mean with a 95 % interval. Temperatures "
        f"{setup['easy']:g} and {setup['hard']:g} in turn, {setup['tokens']} tokens a response, "
        f"{setup['threads']} threads, {setup['rounds']} rounds in turns. Tokens: the same in all."
    )
    heads = ["drafter", "batch", *THRESHOLDS]
    return markdown(
        f"{report['subject']}: one budget of verified tokens for a batch", report, about, table(heads, rows)
    )


def benchmark(arguments: Sequence[str]) -> None:
    options, config = parse(arguments)
    torch.set_num_threads(options.threads)
    config = pin(config)
    setup = {name: getattr(options, name) for name in ("easy", "hard", "tokens", "threads", "rounds")}
    with loaded(options, config) as (subject, grown):
        described = {**header(config, said("draft_budget", arguments)), **grown, "setup": setup}
        cells: list[dict[str, Any]] = []
        for name in subject.drafters:
            for batch_size in map(int, options.batches):
                print(f"{name}, batch {batch_size}", flush=True)
                cells.append(measure_cell(subject, options, name, batch_size))
                report = {**described, "cells": cells}
                write_report(options.out, report, to_markdown(report))
    print(to_markdown(report))


if __name__ == "__main__":
    sys.exit(carry_out("draft_budget", lambda: benchmark(sys.argv[1:])))

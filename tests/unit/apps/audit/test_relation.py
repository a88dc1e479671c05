"""The invariance relation: an engine whose log-probabilities depend on their company is found by one bit."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.apps.audit.conftest import Answer
from tests.unit.apps.audit.test_command import run
from tests.unit.apps.audit.test_server import referee_of, sampler
from tests.unit.apps.cli.parts import fail
from tlt.apps.audit.relation import TokenPlace, compare, half_prefilled, in_batches
from tlt.apps.cli import main as cli
from tlt.apps.cli.judge import summarize
from tlt.base.types import Request, Rollout, SamplingParams
from tlt.engine.own.engine import RolloutEngine

REQUESTS = [Request(f"p{i}", i % 2, (i, 5), SamplingParams()) for i in range(7)]


def response_to(request: Request) -> Rollout:
    """A continued request keeps what it was given."""
    tokens = tuple(range(request.prompt_ids[0] + 4))
    logprobs = (*request.logprobs, *(-math.log(3 + token) for token in tokens[len(request.logprobs) :]))
    return Rollout(request.problem_id, request.sample_index, request.prompt_ids, tokens, logprobs, "stop", 0)


def next_float(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(0)))


def lawful(batch: Sequence[Request]) -> list[Rollout]:
    return [response_to(request) for request in batch][::-1]  # in any order


def in_company(batch: Sequence[Request]) -> list[Rollout]:
    """Of a batch of several, the first response's third log-probability is off by one bit."""
    first, *others = map(response_to, batch)
    if others:
        logprobs = [*first.logprobs]
        logprobs[2] = math.nextafter(logprobs[2], 0)
        first = replace(first, logprobs=tuple(logprobs))
    return [first, *others]


def test_a_lawful_engine_is_invariant_in_batches_of_every_size_and_continued() -> None:
    alone = in_batches(lawful, REQUESTS, 1)
    num_tokens = sum(len(one.token_ids) for one in alone)
    for size in (1, 2, 3, 7, 64):
        relation = compare("batch", alone, in_batches(lawful, REQUESTS, size), len(REQUESTS))
        assert relation.verdict == "invariant"
        assert (relation.num_logprobs, relation.num_equal) == (num_tokens, len(REQUESTS))
    continued = compare("prefilled", alone, half_prefilled(lawful, REQUESTS, alone), len(REQUESTS))
    assert continued.verdict == "invariant"
    assert continued.num_logprobs == sum(len(one.token_ids) - len(one.token_ids) // 2 for one in alone)


def test_one_bit_that_depends_on_company_is_found_with_its_place() -> None:
    alone = in_batches(in_company, REQUESTS, 1)
    relation = compare("batch of 3", alone, in_batches(in_company, REQUESTS, 3), len(REQUESTS))
    assert relation.verdict == "not invariant"
    assert (relation.num_differing, relation.num_equal) == (2, 7)  # the last batch is of one
    assert 0 < relation.largest < 1e-15
    assert relation.first == TokenPlace(0, "p0", 2)
    assert relation.sentence.startswith("NOT invariant: 2 of 49 log-probabilities differ, by up to ")
    assert relation.sentence.endswith("first in response 0 (p0), token 2")


def test_tokens_that_part_end_the_comparison_and_are_found() -> None:
    alone = in_batches(lawful, REQUESTS, 1)
    other = replace(
        alone[3], token_ids=(*alone[3].token_ids[:2], 60, 61), logprobs=(*alone[3].logprobs[:2], 0.0, 0.0)
    )
    relation = compare("4x1x4, batch of 1", alone, [*alone[:3], other, *alone[4:]], len(REQUESTS))
    assert (relation.num_differing, relation.num_equal, relation.first) == (0, 6, TokenPlace(3, "p3", 2))
    assert "6 of 7 responses have the same tokens" in relation.sentence
    assert "compare at --temperature 0" in relation.sentence


def test_a_continued_response_is_compared_from_its_second_half_on() -> None:
    alone = in_batches(lawful, REQUESTS, 1)

    def forgets(batch: Sequence[Request]) -> list[Rollout]:
        """Reads a prefix less exactly than it was drawn: a later log-probability is off."""
        (one,) = map(response_to, batch)
        return [replace(one, logprobs=(*one.logprobs[:-1], one.logprobs[-1] * (1 + 2**-52)))]

    continued = half_prefilled(forgets, REQUESTS, alone)
    relation = compare("prefilled", alone, continued, len(REQUESTS))
    assert relation.num_differing == len(REQUESTS)
    assert relation.first == TokenPlace(0, "p0", len(alone[0].token_ids) - 1)


def test_a_missing_response_leaves_the_relation_undecided() -> None:
    alone = in_batches(lawful, REQUESTS, 1)
    relation = compare("batch of 2", alone, alone[1:], len(REQUESTS))
    assert (relation.verdict, relation.num_missing) == ("undecided", 1)
    assert compare("batch of 2", [], [], 0).verdict == "undecided"


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────

INVARIANCE = ("--prompts", "prompts.jsonl", "--test", "invariance", "--batch-sizes", "2,6,64")
ENGINE = (*INVARIANCE, "--samples", "3", "--max-tokens", "20")


def test_a_run_with_equal_rows_has_the_engines_bits_in_its_update(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numba", reason="rows are equal in compiled loops")
    words = ("--speculation", "off,ngram:4x1x4", "--equal-rows")
    code, summary, _ = run(capsys, "engine", str(model), *ENGINE, *words)
    assert code == 0
    assert all(one["invariant"] for one in summary["ways"].values())
    assert cli.main(("audit", "engine", str(model), *ENGINE, *words, "--dtype", "float64")) == 2
    assert "--equal-rows: dtype is float64, where PyTorch's products depend on" in capsys.readouterr().err


def test_our_engine_gives_the_same_bits_in_batches_and_with_drafts(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--speculation", "off,ngram:4x1x4", "--out", "report.json"]
    _, summary, text = run(capsys, "engine", str(model), *ENGINE, *words)
    ways = summary["ways"]
    assert [*ways] == [
        "off, batch of 2",
        "off, batch of 6",
        "off, prefilled",
        "ngram:4x1x4, batch of 1",
        "ngram:4x1x4, batch of 2",
        "ngram:4x1x4, batch of 6",
        "ngram:4x1x4, prefilled",
        "trainer",
    ]
    assert all(one["invariant"] for way, one in ways.items() if "batch" in way)
    assert all(one["equal"] == one["responses"] == 6 for one in ways.values())
    assert ways["trainer"]["largest"] < 1e-4
    assert text.startswith("off, batch of 2: invariant: 0 of ")
    written = json.loads((here / "report.json").read_text())["ways"]
    assert [one["way"] for one in written] == [*ways]


def test_a_planted_fault_of_one_bit_in_company_is_exit_code_1(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate: Any = RolloutEngine.generate

    def faulty(engine: RolloutEngine, requests: Sequence[Request]) -> Iterator[Rollout]:
        for rollout in generate(engine, requests):
            off = next_float(rollout.logprobs[-1])
            yield replace(rollout, logprobs=(*rollout.logprobs[:-1], off)) if len(requests) > 1 else rollout

    monkeypatch.setattr(RolloutEngine, "generate", faulty)
    code, summary, text = run(capsys, "engine", str(model), *ENGINE)
    assert (code, summary["invariant"], summarize(summary).headline) == (1, False, "NOT invariant")
    for size in (2, 6):
        assert summary["ways"][f"off, batch of {size}"]["differing"] == 6
    assert text.startswith("off, batch of 2: NOT invariant: 6 of ")


def scorer(model: Path, is_faulty: bool = False, echoes: bool = True) -> Answer:
    """A server with log-probabilities. Faulty: of requests that are not alone, the first one is off by a
    bit."""
    sample, running, lock = sampler(model), Counter[str](), threading.Lock()

    def scores(prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        (logits_TV,) = referee_of(model).logits(prompt, tokens)
        return logits_TV.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    def answer(payload: dict[str, Any]) -> dict[str, Any]:
        assert payload["logprobs"] == 1
        if payload.get("echo"):
            ids = payload["prompt"]
            known = [None, *scores(ids[:1], ids[1:]), -0.5]
            return {"choices": [{"logprobs": {"token_logprobs": known if echoes else known[-1:]}}]}
        with lock:
            running["requests"] += 1
        answered = sample(payload)
        time.sleep(0.01)
        with lock:
            is_alone = running["requests"] == 1
            running["requests"] -= 1
        (choice,) = answered["choices"]
        ids = [*payload["prompt"], *choice["token_ids"]]
        logprobs = scores(ids[:1], ids[1:])[len(payload["prompt"]) - 1 :]
        if is_faulty and not is_alone:
            logprobs[0] = next_float(logprobs[0])
        choice["logprobs"] = {"token_logprobs": logprobs}
        return answered

    return answer


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_server_is_compared_alone_in_company_and_with_what_it_reads_as_a_prompt(
    is_faulty: bool,
    model: Path,
    here: Path,
    serve: Callable[[Answer], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = serve(scorer(model, is_faulty))
    words = (*INVARIANCE, "--engine-model", "m", "--samples", "3", "--max-tokens", "5")
    code, summary, text = run(capsys, "server", str(model), "--url", url, *words)
    ways = summary["ways"]
    assert [*ways] == ["batch of 2", "batch of 6", "prefilled"]
    assert ways["prefilled"]["invariant"]
    assert ways["prefilled"]["logprobs"] == ways["batch of 2"]["logprobs"]
    assert code == (1 if is_faulty else 0)
    assert ways["batch of 6"]["invariant"] != is_faulty
    assert text.startswith("batch of 2: ")


def test_a_server_that_echoes_no_prompt_is_compared_without_it(
    model: Path, here: Path, serve: Callable[[Answer], str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(scorer(model, echoes=False))
    words = (*INVARIANCE, "--engine-model", "m", "--samples", "1", "--max-tokens", "3")
    assert cli.main(["audit", "server", str(model), "--url", url, *words]) == 0
    captured = capsys.readouterr()
    assert [*json.loads(captured.out.splitlines()[-1])["ways"]] == ["batch of 2"]  # of two requests
    assert "tlt: prefilled: not compared: --url: http://127.0.0.1" in captured.err


@pytest.mark.parametrize("logprobs", [None, [0.0], {"token_logprobs": []}, {"token_logprobs": [None]}])
def test_a_server_without_log_probabilities_is_refused_in_one_line(
    logprobs: Any,
    model: Path,
    here: Path,
    serve: Callable[[Answer], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = serve(lambda payload: {"choices": [{"token_ids": [5], "logprobs": logprobs}]})
    line = fail(capsys, "audit", "server", str(model), "--url", url, "--engine-model", "m", *INVARIANCE)
    assert "returns no log-probability of each token" in line
    assert line.endswith("audit a server that does, or --test law")

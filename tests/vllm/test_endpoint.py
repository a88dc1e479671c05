"""`tlt serve` under load, asked by 64 clients of the `openai` package: the tuner changes the length of drafts
all the time, clients leave in mid-stream, and neither changes a token; vLLM's counters say what happened.

TLT_ENDPOINT=RUN asks the same of a run's endpoint, with the run's own problems.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.parts import served
from tests.vllm.serving import (
    BASE,
    DRAFTER,
    ROOT,
    client_of,
    end_server,
    prompts,
    serving_environment,
    wait_until_healthy,
)
from tlt.base.config.schema import Config
from tlt.training.build.problems import load_problems

pytestmark = served

NUM_CLIENTS, MAX_TOKENS = 64, 48
RUN = os.environ.get("TLT_ENDPOINT")
COUNTED = ("drafts", "draft_tokens", "accepted_tokens")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("endpoint")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = [RUN] if RUN else [str(BASE), "--drafter", str(DRAFTER)]
    theirs = ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    theirs += ["--max-model-len", "512", "--per-request-spec-decode-metrics", "detailed"]
    command = [sys.executable, "-m", "tlt", "serve", *source, "--name", "m", "--", *theirs]
    log = folder / "server.log"
    with log.open("w") as said:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **serving_environment(folder)},
            stdout=said,
            stderr=said,
            process_group=0,
        )
    try:
        wait_until_healthy(child, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        end_server(child)
        if kept := os.environ.get("TLT_ENDPOINT_LOG"):
            Path(kept).write_text(log.read_text(errors="replace"))


@functools.cache
def asked() -> list[str] | list[list[int]]:
    """Returns 16 prompts: of Countdown, or of the run's task as the run wrote them."""
    if RUN is None:
        return prompts(16)
    config = Config.from_json((Path(RUN) / "config.json").read_text())
    return [list(problem.prompt_ids) for problem in load_problems(config, "train")[:16]]


def ask(client: Any, seed: int) -> Any:
    """Asks with a seed of its own; every third request is truncated, every fourth has log-probabilities."""
    law: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9} if seed % 3 == 2 else {"temperature": 1.0}
    logprobs = {"logprobs": 2} if seed % 4 == 0 else {}
    prompt = asked()[seed % 16]
    return client.completions.create(
        model="m", prompt=prompt, seed=seed, max_tokens=MAX_TOKENS, **law, **logprobs
    )


def leave(client: Any, seed: int) -> None:
    """Asks for a stream and hangs up after its third chunk."""
    words = {"model": "m", "prompt": asked()[seed % 16], "seed": seed, "max_tokens": 400}
    with client.completions.create(**words, stream=True, temperature=1.0) as stream:
        for number, _ in enumerate(stream):
            if number == 2:
                return


def counters(url: str) -> Counter[str]:
    """Returns vLLM's counters of speculation; those by position as position-N."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        for name in COUNTED:
            if line.startswith(f"vllm:spec_decode_num_{name}_total{{"):
                found[name] += int(float(line.split()[-1]))
        if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{"):
            position = line.partition('position="')[2].partition('"')[0]
            found[f"position-{position}"] += int(float(line.split()[-1]))
    return found


def told_by(answers: list[Any]) -> Counter[str]:
    """Returns the same counts, from what each response says of itself."""
    found: Counter[str] = Counter()
    for answer in answers:
        if (told := (answer.model_extra.get("metrics") or {}).get("speculative_decoding")) is None:
            continue
        steps = list(zip(told["per_step_accepted"] or (), told["per_step_drafted"] or (), strict=True))
        assert all(0 <= accepted <= drafted for accepted, drafted in steps)
        found["drafts"] += len(steps)
        for accepted, drafted in steps:
            found["draft_tokens"] += drafted
            found["accepted_tokens"] += accepted
            found.update(f"position-{index}" for index in range(accepted))
        # the first token is the prompt's step; a draft's tokens behind the response's end are dropped
        assert sum(accepted + 1 for accepted, _ in steps) < answer.usage.completion_tokens + 8
    return found


def lengths_of(answers: list[Any]) -> set[int]:
    """Returns the lengths of drafts, 0 where a token came without."""
    found = set[int]()
    for answer in answers:
        told = (answer.model_extra.get("metrics") or {}).get("speculative_decoding") or {}
        found.update(told.get("per_step_drafted") or ())
        by_drafts = sum(accepted + 1 for accepted in told.get("per_step_accepted") or ())
        if answer.usage.completion_tokens > 1 + by_drafts:  # the first token is the prompt's step
            found.add(0)
    return found


def text_of(answer: Any) -> str:
    (choice,) = answer.choices
    return str(choice.text)


def logprobs_of(answer: Any) -> list[float]:
    """Returns the log-probabilities of a response's tokens; []: none were asked for."""
    (choice,) = answer.choices
    return [] if choice.logprobs is None else list(choice.logprobs.token_logprobs)


def test_a_response_that_a_stop_text_ended_says_what_was_drafted_for_it(url: str) -> None:
    client, num_told = client_of(url), 0
    for seed in range(16):
        whole = text_of(ask(client, seed))
        stop = whole[len(whole) // 2 :][:3]
        if len(stop) < 3:
            continue
        words = {"model": "m", "prompt": asked()[seed % 16], "seed": seed, "max_tokens": MAX_TOKENS}
        law = {"temperature": 0.7, "top_p": 0.9} if seed % 3 == 2 else {"temperature": 1.0}
        found = client.completions.create(**words, **law, stop=[stop])
        assert text_of(found) == whole[: whole.index(stop)]
        steps = told_by([found])
        num_told += steps["drafts"] > 0
        assert steps["drafts"] + steps["accepted_tokens"] < found.usage.completion_tokens + 8
    assert num_told > 4


def test_neither_company_nor_tuner_nor_leaving_clients_change_a_token(url: str) -> None:
    client, seeds = client_of(url), range(NUM_CLIENTS)
    before = counters(url)
    alone = [ask(client, seed) for seed in seeds]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        together = list(pool.map(lambda seed: ask(client, seed), seeds))
    counted = counters(url) - before
    assert counted["drafts"] > 0
    assert counted == told_by(alone + together)
    assert len(lengths_of(alone + together)) > 1, "the tuner has changed the length"

    with ThreadPoolExecutor(2 * NUM_CLIENTS) as pool:
        leaving = [pool.submit(leave, client, 1000 + seed) for seed in seeds]
        disturbed = list(pool.map(lambda seed: ask(client, seed), seeds))
        for each in leaving:
            each.result()
    wanted = [text_of(answer) for answer in alone]
    assert [text_of(answer) for answer in together] == wanted
    assert [text_of(answer) for answer in disturbed] == wanted
    assert len(set(wanted)) > NUM_CLIENTS // 4
    for one, two, three in zip(alone, together, disturbed, strict=True):
        assert logprobs_of(two) == pytest.approx(logprobs_of(one), abs=1e-3)
        assert logprobs_of(three) == pytest.approx(logprobs_of(one), abs=1e-3)
    assert sum(map(len, map(logprobs_of, alone))) > NUM_CLIENTS
    assert text_of(ask(client, 0)) == wanted[0], "the server goes on"

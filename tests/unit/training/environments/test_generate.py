"""tlt generate and tlt score with an environment: the tokens of a run's evaluation, whatever the speculation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from tests.unit.apps.cli.parts import fail, read_lines, succeed, write_lines
from tests.unit.training.environments import parts, tools
from tests.unit.training.environments.test_turns import KINDS, configure, responses
from tlt.apps.api import train

TOOLS = tools.__name__


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts.write_model(tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_lines("prompts.jsonl", *({"prompt": f"{n} + {n}?"} for n in range(4)))
    return tmp_path


def write_environment(kind: str) -> None:
    values = {"max_turns": 4, **KINDS[kind]}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    Path("environment.toml").write_text("\n".join(["[environment]", *lines]))


def generate(
    capsys: pytest.CaptureFixture[str], model: Path, *words: str, source: str = "environment.toml"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    options = (
        "--prompts prompts.jsonl --out out.jsonl --samples 4 --dtype float64 --device cpu --max-tokens 400"
    )
    stop = ("--stop", "</tool_call>", "--environment", source)
    found = succeed(capsys, "generate", str(model), *options.split(), *stop, *words)
    return found, read_lines("out.jsonl")


@pytest.mark.parametrize("kind", cases(KINDS, usual=["tools"]))
def test_speculation_changes_neither_tokens_nor_turns(
    model: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_environment(kind)
    told = []
    for speculation, batch in (("off", "64"), ("ngram:3x2x6", "3")):
        words = ("--speculation", speculation, "--max-batch-size", batch)
        found, lines = generate(capsys, model, *words)
        for line in lines:
            del line["logprobs"], line["turns"]["seconds"]
        told.append(lines)
        given = sum(end - first for line in lines for first, end in line["turns"]["given"])
        assert found["turns"]["given_tokens"] == given > 0
        assert found["tokens"] == sum(len(line["token_ids"]) for line in lines) - given
        assert found["turns"]["num_calls"] == sum(line["turns"]["num_calls"] for line in lines)
    assert told[0] == told[1]
    assert [(line["problem_id"], line["sample_index"]) for line in told[0][:5]] == [
        *(("1", n) for n in range(4)),
        ("2", 0),
    ]
    assert max(len(line["turns"]["given"]) for line in told[0]) > 1
    assert all("state" not in line["turns"] for line in told[0])


def test_the_prompt_of_an_environment_is_the_runs(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run's folder, whose evaluation shows the same prompts and calls the same tools."""
    config = configure(
        model,
        here / "run",
        "game",
        run={"num_steps": 0},
        task={"name": "data", "data": str(here / "prompts.jsonl")},
        evaluation={"num_problems": 4, "data": str(here / "prompts.jsonl"), "samples_per_problem": 2},
        rewards={"num_workers": 1, "functions": []},
    )
    assert train(config).is_finished
    _, lines = generate(capsys, model, source=str(here / "run"))
    evaluated = responses(here / "run")
    assert len(evaluated) == 8
    prompts = {line["problem_id"]: line["prompt_ids"] for line in lines}
    assert all(prompts[one["problem_id"]] == one["prompt_ids"] for one in evaluated)
    assert all(one["reward"] == pytest.approx(one["turns"]["reward"]) for one in evaluated)
    assert any(one["turns"]["given"] for one in evaluated)
    assert {*evaluated[0]["turns"]} == {*lines[0]["turns"]}


def test_score_takes_the_last_turn_the_messages_and_the_environments_reward(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_environment("game")
    _, lines = generate(capsys, model)
    words = ("score", "--problems", "prompts.jsonl", "--responses", "out.jsonl", "--out", "scores.jsonl")
    alone = succeed(capsys, *words)
    rewards = [line["turns"]["reward"] for line in lines]
    assert alone["mean_reward"] == pytest.approx(sum(rewards) / len(rewards))
    (here / "turn_scores.py").write_text(
        "def last(completions): return [float(len(c[-1]['content'])) for c in completions]\n"
        "def results(completions): return [float(sum(m['role'] == 'tool' for m in c)) for c in completions]\n"
        "def tokens(completion_ids): return [float(len(ids)) for ids in completion_ids]\n"
    )
    monkeypatch.syspath_prepend(str(here))
    functions = "turn_scores:last,turn_scores:results,turn_scores:tokens"
    succeed(capsys, *words, "--functions", functions)
    several = [line for line in read_lines("scores.jsonl") if line["turns"]["given"]]
    assert len(several) > 4
    for line in several:
        turns, scored = line["turns"], line["reward_parts"]
        settled = turns["given"][-1][1]
        assert scored["last"] == len(turns["last_turn"])
        assert scored["results"] == sum(message["role"] == "tool" for message in turns["messages"])
        assert scored["tokens"] == len(line["token_ids"]) - settled
        assert scored["environment"] == turns["reward"]
        assert line["reward"] == pytest.approx(sum(scored.values()))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[run]\nseed = 1", "--environment: environment.toml has no environment; give a configuration whose"),
        ("[environment]\nmax_turns = 3", "--environment: environment.toml has no environment"),
        ("[environment]\ntool = 'a:b'", "environment.toml: environment.tool is unknown; did you mean"),
        ("[environment]\ntools = ['absent_module:f']", "absent_module"),
        (f"[environment]\ntools = ['{TOOLS}:absent']", "absent"),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(
    model: Path, text: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("environment.toml").write_text(text)
    words = "--prompts prompts.jsonl --out out.jsonl --environment environment.toml"
    assert part in fail(capsys, "generate", str(model), *words.split())
    assert not Path("out.jsonl").exists()


def test_turns_that_generate_has_not_written_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("out.jsonl", {"problem_id": "1", "text": "a", "turns": {"given": 3}})
    words = "score --problems prompts.jsonl --responses out.jsonl --functions tests.unit:f"
    assert "out.jsonl:1: turns is {'given': 3}; it must be as tlt generate" in fail(capsys, *words.split())

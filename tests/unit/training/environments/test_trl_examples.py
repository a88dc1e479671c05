"""TRL's examples of tools and environments in `tlt train`, unedited."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.unit.models.hf.checkpoint_parts import hash_of
from tests.unit.training.environments import parts, trl_examples
from tests.unit.training.environments.test_turns import responses, tokens_of
from tlt.apps.api import train
from tlt.base.config.load import load_config

HERE = trl_examples.__name__
CALLS = (
    *(parts.a_call("multiply", a=a, b=7) for a in range(4)),
    *(parts.a_call("async_add", a=a, b=9) for a in range(4)),
    *(parts.a_call("increment", step=step) for step in (1, 2, 3)),
    parts.a_call("run_code", code="print(1)"),
    parts.a_call("move", action="up"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts.write_model(tmp_path_factory.mktemp("examples") / "model", calls=CALLS)


def configure(model: Path, folder: Path, **more: dict[str, Any]) -> Any:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "task": {"name": "seeds", "num_problems": 16},
        "run": {"num_ranks": 1, "num_steps": 2, "out_dir": str(folder), "device": "cpu", "dtype": "float64"},
        "rollout": {"problems_per_step": 4, "samples_per_problem": 4},
        "sampling": {"max_tokens": 400, "stop": ["</tool_call>"]},
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"num_problems": 0},
        "rewards": {"num_workers": 1},
    }
    for section, values in more.items():
        sections[section] = {**sections.get(section, {}), **values}
    return load_config(sections)


def counter_of(turns: dict[str, Any]) -> int:
    said = [m["content"] for m in turns["messages"] if m["role"] == "tool" and m["name"] == "increment"]
    return int(said[-1]) if said else 0


def test_the_environment_that_samples_itself_has_the_target_of_its_prompt(
    model: Path, tmp_path: Path
) -> None:
    """With speculation and without; its reward and a function of `environments` count."""
    told = []
    for speculation in ("off", "ngram:3x2x6"):
        config = configure(
            model,
            tmp_path / speculation.replace(":", "-"),
            environment={"factory": f"{HERE}:IncrementEnv", "max_turns": 4},
            rewards={"functions": [f"{HERE}:from_state"]},
            rollout={"speculation": speculation},
        )
        assert train(config).is_finished
        told.append((hash_of(config.run.out_dir / "policy"), tokens_of(config.run.out_dir)))
    assert told[0] == told[1]
    assert told[0][0] != hash_of(model)
    tokenizer, targets, counters = AutoTokenizer.from_pretrained(model), set(), set()
    for one in responses(config.run.out_dir):
        found = re.search(r"counter by (\d)\.", tokenizer.decode(one["prompt_ids"]))
        assert found is not None
        target, counter = int(found[1]), counter_of(one["turns"])
        parts_of = {"environment": float(counter == target), "from_state": counter / 100}
        assert one["reward_parts"] == pytest.approx(parts_of)
        targets.add(target)
        counters.add(counter)
    assert len(targets) > 2
    assert len(counters) > 2


def test_its_tools_answer(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + {n}?"}) + "\n" for n in range(4)))
    config = configure(
        model,
        tmp_path / "run",
        task={"name": "data", "data": str(rows), "num_problems": None},
        environment={"tools": [f"{HERE}:multiply", f"{HERE}:async_add"], "max_turns": 4},
        rewards={"functions": ["tests.unit.training.environments.tools:score"]},
    )
    assert train(config).is_finished
    messages = [m for one in responses(config.run.out_dir) for m in one["turns"]["messages"]]
    said = {(m["name"], m["content"]) for m in messages if m["role"] == "tool"}
    assert ("multiply", "21") in said
    assert ("async_add", "12") in said


def test_of_several_environments_a_row_names_one(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"environment": name}) + "\n" for name in ("coding", "game") * 2))
    config = configure(
        model,
        tmp_path / "run",
        task={"name": "data", "data": str(rows), "num_problems": None},
        environment={"factories": {"coding": f"{HERE}:CodingEnv", "game": f"{HERE}:GameEnv"}, "max_turns": 4},
        rewards={"functions": ["tests.unit.training.environments.tools:score"]},
    )
    assert train(config).is_finished
    tokenizer = AutoTokenizer.from_pretrained(model)
    for one in responses(config.run.out_dir):
        prompt = tokenizer.decode(one["prompt_ids"])
        is_game = "Reach the goal tile." in prompt
        assert is_game != bool(re.search(r"Compute the \d+th Fibonacci number\.", prompt))
        assert ("move" in prompt) == is_game
        own, other = ("move", "run_code") if is_game else ("run_code", "move")
        for message in one["turns"]["messages"]:
            if message["role"] == "tool":
                assert (message["content"] == "None") == (message["name"] == own)
                assert (f"no tool '{other}'" in message["content"]) == (message["name"] == other)

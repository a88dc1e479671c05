"""Environments of skyrl-gym: actions, tools, rewards that are summed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tests.unit.tasks.environments.played import begin, environments, library, reward, say

ENV = "skyrl_gym:Env"
COUNTER = """
from skyrl_gym.tools.core import ToolGroup, tool

class Numbers(ToolGroup):
    @tool
    def double(self, value):
        return 2 * value

class Counter:
    def __init__(self, env_config, extras):
        self.goal, self.step_reward = extras["reward_spec"]["ground_truth"], env_config.step_reward
        self.tools, self.prompt = Numbers("numbers"), extras.get("shown")

    def init(self, prompt):
        return prompt if self.prompt is None else [{"role": "user", "content": self.prompt}], {}

    def step(self, action):
        found = self.tools.execute_tool("double", int(action))
        right = found == self.goal
        said = [{"role": "user", "content": f"{found}, not {self.goal}"}, {"role": "user", "content": "Again."}]
        return {"observations": said, "reward": 1.0 if right else self.step_reward, "done": right, "metadata": {}}
"""


@pytest.fixture(params=["stand-in", "library"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with library("skyrl_gym", request.param == "stand-in", monkeypatch):
        yield request.param
    sys.modules.pop("omegaconf", None)


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "counter.py").write_text(COUNTER)
    prompt = [{"role": "user", "content": "Which number is half of it?"}]
    return {
        "problem_id": "1",
        "env_class": f"{tmp_path / 'counter.py'}:Counter",
        "env_config": {"step_reward": 0.25},
        "prompt": prompt,
        "reward_spec": {"ground_truth": 6},
    }


def test_actions_are_answered_by_tools_and_their_rewards_are_summed(row: dict[str, Any]) -> None:
    assert begin(environments(ENV), row) is None
    first = say(environments(ENV), row, "<think>3</think>1", "")
    assert first.text == "2, not 6\nAgain."
    second = say(environments(ENV), row, "2", first.state)
    assert second.text == "4, not 6\nAgain."
    last = say(environments(ENV), row, "3", second.state)
    assert last.text is None
    rewards = [reward(environments(ENV), row, one.state) for one in (first, second, last)]
    assert rewards == [0.25, 0.5, 1.5]


def test_what_init_adds_is_shown_and_what_it_rewrites_is_refused(row: dict[str, Any]) -> None:
    asked = row["prompt"][0]["content"]
    assert begin(environments(ENV), {**row, "shown": f"{asked} Hurry."}) == " Hurry."
    assert begin(environments(ENV), {**row, "prompt": asked}) is None
    with refused("init\\(\\) of the environment rewrites its prompt"):
        begin(environments(ENV), {**row, "shown": "What?"})


def test_registered_environments_are_found_by_name(kind: str, row: dict[str, Any]) -> None:
    gsm8k = {**row, "env_class": "gsm8k_multi_turn", "reward_spec": {"ground_truth": "6"}, "max_turns": 3}
    if kind == "stand-in":
        with pytest.raises(ValueError, match="No registered env"):
            begin(environments(ENV), gsm8k)
        return
    said = say(environments(ENV), gsm8k, "It is 5.\n#### 5", "")
    assert "tentative" in str(said.text)
    said = say(environments(ENV), gsm8k, "#### 6", said.state)
    assert said.text is None
    assert reward(environments(ENV), gsm8k, said.state) == pytest.approx(1.0 + 0.2 / 3)


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with refused(r"environment: no module 'skyrl_gym'; pip install "):
        environments(ENV)
